"""A CuPy that answers what it is told to, so that what it can answer is tested without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class FakeCUDAError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


OUT_OF_MEMORY = FakeCUDAError(2, "cudaErrorMemoryAllocation: out of memory")
NO_DEVICE = FakeCUDAError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
OLD_DRIVER = FakeCUDAError(35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient")
BUSY = FakeCUDAError(46, "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable")


def fake_cupy(
    capability: str = "90",
    driver: int = 13000,
    runtime: int = 13000,
    count: Any = 4,
    memory: Any = (80 * 10**9, 81 * 10**9),
    allocation: Any = None,
    use: Exception | None = None,
) -> ModuleType:
    """A CuPy whose answers are given; an exception among them is raised."""

    def answer(given: Any) -> Any:
        def called(*_: Any) -> Any:
            if isinstance(given, Exception):
                raise given
            return given

        return called

    made = ModuleType("cupy")
    made.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=lambda number=3: SimpleNamespace(id=number, compute_capability=capability, use=answer(use)),
        Memory=answer(allocation),
        alloc_pinned_memory=answer(allocation),
        Stream=lambda non_blocking: None,
        runtime=SimpleNamespace(
            driverGetVersion=answer(driver),
            runtimeGetVersion=answer(runtime),
            getDeviceCount=answer(count),
            memGetInfo=answer(memory),
            CUDARuntimeError=FakeCUDAError,
        ),
    )
    return made


@contextmanager
def on_fake(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it the modules that need CuPy are imported anew, on this one; afterwards they are as before."""
    names = [
        f"collectives.cuda.{part}"
        for part in (
            "dense_algorithms",
            "dense_p2p",
            "dense_vector",
            "device",
            "kernels",
            "launch",
            "layouts",
            "mailbox",
            "rows",
        )
    ]
    names += ["collectives.mpi_cuda", "collectives.device_transport", "collectives.symmetric_memory"]
    names += [
        f"oktopk.cuda.{part}"
        for part in (
            "backend",
            "kernels",
            "kth_select",
            "layouts",
            "p2p_step",
            "p2p_graph",
            "select",
        )
    ]
    with monkeypatch.context() as patch:
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        patch.setitem(sys.modules, "cupy", cupy)
        try:
            yield
        finally:
            for name in names:
                sys.modules.pop(name, None)
                package, _, attribute = name.rpartition(".")
                if package in sys.modules:  # `from package import module` asks the package first
                    vars(sys.modules[package]).pop(attribute, None)
