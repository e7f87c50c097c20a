"""The doctor: whatever a process that tries something does, the doctor says it in a sentence and lives."""

from __future__ import annotations

import importlib
import json
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import mpi4py
import numpy as np
import pytest

import collectives
import oktopk.cuda.layouts  # noqa: F401 - declares structs that source_with_layouts puts before a source
from collectives.cuda.layouts import source_with_layouts
from oktopk.doctor import __main__ as doctor
from oktopk.doctor import children
from oktopk.doctor import probe as doctor_probe
from oktopk.doctor.children import as_given, find_launcher, how_it_ended, one, two
from oktopk.doctor.verdict import BEST, CANNOT, SLOWER
from oktopk.launch import LaunchError, find_mpiexec
from tests.fake_cupy import on_fake
from tests.oktopk.doctor.test_verdict import gpu_host

ROOT = Path(__file__).resolve().parents[3]


def probe(folder: Path, body: str) -> list[str]:
    """A stand-in for the probe, as what follows `python -m mpi4py`."""
    script = folder / "probe.py"
    script.write_text(
        "import json, os, signal, sys, time\nwhat, path = sys.argv[1:]\n"
        "def write(number, **found): open(f'{path}.{number}', 'w').write(json.dumps(found))\n" + body
    )
    return [str(script)]


MPI = "from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "a process died of SIGSEGV (a segmentation fault)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "a process died of SIGKILL"),
        ("raise RuntimeError('no milk')", "ended with status 1: RuntimeError: no milk"),
        ("sys.exit(3)", "ended with status 3: nothing"),
        ("pass", "rank(s) [0] ended without a word"),
        ("write(0, problem='no sugar'); sys.exit(1)", "no sugar"),
        ("write(0, problem='', cups=2)", ""),
        ("time.sleep(60)", "did not end in 2 s, and was ended"),
    ],
)
def test_however_one_process_ends_it_is_a_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    found = one("tea", 2 if "sleep" in body else 40, probe(tmp_path, body))
    assert found["problem"] == sentence
    assert sentence or found["cups"] == 2


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("if rank: os.kill(os.getpid(), signal.SIGSEGV)\nMPI.COMM_WORLD.Barrier()", "died of SIGSEGV"),
        ("if rank: raise RuntimeError('no milk')\nMPI.COMM_WORLD.Barrier()", "RuntimeError: no milk"),
        (
            "if rank:\n  write(1, problem='MemoryError: full')\n  raise MemoryError\nMPI.COMM_WORLD.Barrier()",
            "rank 1: MemoryError: full",
        ),
        ("write(rank, problem='', rank=rank, milk=os.environ['MILK'])", ""),
    ],
)
def test_however_two_ranks_end_it_is_a_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    found = two(find_mpiexec(), "tea", 40, {"MILK": "oat"}, probe(tmp_path, MPI + body))
    assert sentence in found["problem"]
    assert sentence or found == {"problem": "", "rank": 0, "milk": "oat"}


def test_two_ranks_that_hang_are_ended_with_nothing_left(tmp_path: Path) -> None:
    body = "open(f'{sys.argv[0]}.{rank}', 'w').write(str(os.getpid()))\nif rank: MPI.COMM_WORLD.recv()\ntime.sleep(60)"
    began = time.monotonic()
    found = two(find_mpiexec(), "tea", 3, probe=probe(tmp_path, MPI + body))
    assert found["problem"] == "did not end in 3 s, and was ended"
    assert time.monotonic() - began < 120
    pids = [
        int(text) for file in tmp_path.glob("probe.py.*") if (text := file.read_text())
    ]  # of those that started
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("status", "output", "sentence"),
    [
        (0, "signal 11", ""),
        (-11, "", "a process died of SIGSEGV (a segmentation fault)"),
        (139, "", "a process died of SIGSEGV (a segmentation fault)"),
        (1, "process rank 1 exited on signal 7 (Bus error).", "a process died of SIGBUS"),
        (
            1,
            "BAD TERMINATION\nterminated by signals sent by prterun",
            "ended with status 1: terminated by signals",
        ),
        (
            2,
            "Traceback\nValueError: density 2\n-----\nmpiexec: gone\n-----",
            "ended with status 2: ValueError: density 2",
        ),
        (255, "-----\n", "ended with status 255: nothing"),
    ],
)
def test_a_status_is_said_with_its_signal_or_its_error(status: int, output: str, sentence: str) -> None:
    assert how_it_ended(status, output).startswith(sentence)
    assert bool(sentence) == bool(how_it_ended(status, output))


def test_what_is_tried_starts_from_the_environment_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HOME": "/root", "OMPI_MCA_pml": "ucx", "OMPI_MCA_opal_common_ucx_tls": "tcp"}
    monkeypatch.setattr(collectives, "WITHOUT_CUDA_UCX", "no wheel")
    assert as_given(given) == given
    monkeypatch.setattr(collectives, "WITHOUT_CUDA_UCX", "")  # then loading it has set what is not set
    assert as_given(given) == {"HOME": "/root", "OMPI_MCA_opal_common_ucx_tls": "tcp"}


def test_the_doctor_starts_where_nothing_is_installed() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            "import sys; from oktopk.doctor import __main__; print('numpy' in sys.modules)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout == "False\n", done.stderr


# launchers


def fake_srun(folder: Path, body: str) -> None:
    path = folder / "srun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def no_mpiexec() -> str:
    raise LaunchError("no mpiexec beside the interpreter nor on PATH")


def test_srun_takes_the_place_of_an_mpiexec_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "find_mpiexec", no_mpiexec)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(LaunchError, match=r"^no mpiexec .*; there is no srun either$"):
        find_launcher()
    # --overlap -n 2 PYTHON -m mpi4py ...
    fake_srun(tmp_path, f'shift 6\nexec {sys.executable} -m jobs.launch -n 2 "$@"')
    with pytest.raises(LaunchError, match="needs an allocation: salloc -n 2 oktopk-doctor"):
        find_launcher()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert find_launcher() == str(tmp_path / "srun")
    found = two(
        find_launcher(),
        "tea",
        40,
        probe=probe(tmp_path, MPI + "write(rank, problem='', of=MPI.COMM_WORLD.size)"),
    )
    assert found == {"problem": "", "of": 2}


def test_ranks_that_do_not_see_each_other_are_told_apart_from_a_pair(tmp_path: Path) -> None:
    fake_srun(tmp_path, 'shift 3\n"$@" &\n"$@" &\nwait')
    found = two(str(tmp_path / "srun"), "host", 40)
    assert found["problem"].startswith("the launcher started processes that see 1 of each other, not 2")
    assert "srun --mpi=" in found["problem"]


# what is tried


class Loopback:
    """Two ranks in one: gives back what the other one would have sent."""

    rank = 0

    def __init__(self, flip: int) -> None:
        self.flip = flip

    def receive(self, array: Any, source: int) -> list[Any]:
        if len(array) == doctor_probe.SIZE // 8:
            array[:] = doctor_probe._random(source)
            array.view(np.uint8)[-1] ^= self.flip
        return []

    def send(self, array: Any, dest: int) -> list[Any]:
        return []

    def wait(self, requests: list[Any]) -> None:
        pass

    def barrier(self) -> None:
        pass


@pytest.mark.parametrize("flip", [0, 1])
def test_one_wrong_bit_in_64_mebibytes_is_seen(monkeypatch: pytest.MonkeyPatch, flip: int) -> None:
    monkeypatch.setattr(doctor_probe, "SIZE", 2**16 if not flip else doctor_probe.SIZE)
    found = doctor_probe._measure(Loopback(flip), np.copy, np.asarray, lambda: None)
    assert bool(found["problem"]) == bool(flip)
    assert flip or (found["latency"] > 0 and found["bandwidth"] > 0)


def test_every_kernel_of_the_library_is_compiled_for_every_type_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: set[tuple[str, str]] = set()

    class Module:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            types = [option.partition("=")[2] for option in options if option.startswith("-DGRADIENT=")]
            self.key = (code, "".join(types))

        def compile(self) -> None:
            built.add(self.key)

        def get_function(self, name: str) -> Any:
            self.compile()
            return MagicMock()

    class Pinned(bytearray):
        ptr = 0

    monkeypatch.setattr(mpi4py.rc, "initialize", mpi4py.rc.initialize)  # which is set there
    cupy = MagicMock()
    cupy.RawModule, cupy.cuda.alloc_pinned_memory = Module, Pinned
    cupy.ndarray = lambda shape, *_, **__: MagicMock(size=shape[0])
    with on_fake(cupy, monkeypatch):
        launches: Any = importlib.import_module("collectives.cuda.launch")
        launches._driver = MagicMock()
        found = doctor_probe._compile()
    assert found.keys() == {"kernel_seconds"}, found
    expected = set()
    for source in (*ROOT.glob("collectives/cuda/*.cu"), *ROOT.glob("oktopk/cuda/*.cu")):
        whole = source_with_layouts(source)
        typed = "GRADIENT" in whole
        expected |= {(whole, kind) for kind in (("float", "__nv_bfloat16", "__half") if typed else ("",))}
    assert built == expected


TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  GPU0 = nothing of the kind
"""


def test_the_links_between_gpus_are_read_without_those_to_others() -> None:
    assert doctor.read_topology(TOPOLOGY) == [["X", "NV18", "SYS"], ["NV18", "X", "PHB"], ["SYS", "PHB", "X"]]
    assert doctor.read_topology("GPU0\tGPU1\nGPU0\tX\tNV18") == []
    assert doctor.read_topology("") == []


# the whole


def test_a_gpu_host_is_examined_try_by_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, tried = gpu_host(), []

    def two_ranks(launcher: str, what: str, timeout: float, extra: dict[str, str]) -> dict[str, Any]:
        tried.append((what, extra))
        return dict(found["exchanges"][what])

    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    monkeypatch.setattr(doctor, "ask_nvidia_smi", lambda: {"driver_name": "580.65.06"})
    monkeypatch.setattr(children, "one", lambda what, _: found["gpu"] if what == "gpus" else {"problem": ""})
    monkeypatch.setattr(children, "two", two_ranks)
    assert doctor.main(["--json", str(tmp_path / "found.json")]) == BEST
    assert tried == [("host", {}), ("device", {}), ("staged", {"OKTOPK_CUDA_AWARE_MPI": "0"}), ("peer", {})]
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["gpu"]["devices"] == found["gpu"]["devices"]
    assert written["path"] == "peer"
    out = capsys.readouterr().out
    assert ["device", "memory,", "staged", "yes", "38.0", "us", "21.0", "GB/s", "GPUs", "0", "and", "1"] in [
        line.split() for line in out.splitlines()
    ]
    (tmp_path / "link.json").symlink_to(tmp_path / "found.json")
    assert doctor.main(["--json", str(tmp_path / "link.json")]) == 2
    assert "link.json" in capsys.readouterr().err
    tried.clear()
    found["gpu"]["problem"] = "there is no GPU"
    assert doctor.main([]) == SLOWER
    assert tried == [("host", {})], "a GPU that cannot be used was tried"
    assert "not usable: there is no GPU" in capsys.readouterr().out


@pytest.mark.skipif(doctor.has_driver(), reason="has a GPU")
def test_a_machine_without_gpu_is_told_that_its_cpu_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oktopk.doctor", "--json", str(tmp_path / "found.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,  # where the cache of kernels is empty
        check=False,
    )
    assert done.returncode == BEST, done.stdout + done.stderr
    assert "none: this host has no NVIDIA driver, and runs on the CPU" in done.stdout
    assert "path: CPU (the best that this hardware allows)" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["exchanges"]["host"]["problem"] == ""
    assert 1e-8 < found["exchanges"]["host"]["latency"] < 1
    assert found["path"] == "cpu"


def test_without_a_launcher_it_says_so_and_leaves_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "find_mpiexec", no_mpiexec)
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor.main([]) == CANNOT
    out = capsys.readouterr().out
    assert "no mpiexec beside the interpreter nor on PATH; there is no srun either" in out
    assert "several ranks cannot run like this" in out
