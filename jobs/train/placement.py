"""Device interface of training: CPU and CUDA."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from mpi4py import MPI

from collectives.cuda.environment import gpu_problem
from jobs.cluster.agreement import Refused, decide_together


class PlacementError(RuntimeError):
    """A device that was asked for and cannot be used."""


class Placement:
    """One rank's device: the CPU.

    Attributes:
        device: torch's name of it.
        description: of the hardware, in words.
        on_gpu: it is a GPU, with CUDA graphs, where fused optimizers are the fast ones.
    """

    device = torch.device("cpu")
    on_gpu = False

    def __init__(self, comm: MPI.Intracomm, deterministic: bool) -> None:
        self.description = platform.processor() or platform.machine()

    def range(self, name: str) -> AbstractContextManager[object]:
        """Within it what is asked for has that name in a profiler."""
        return nullcontext()

    def mark(self) -> Any:
        """Now, after all work that was asked for before; for `read`. Waits for nothing."""
        return time.perf_counter()

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Times of the marks, by time.perf_counter(); waits for the last one."""
        return list(marks)


class CudaPlacement(Placement):
    """The GPU of this rank's place on its host, round robin: several ranks may share one.

    Args:
        comm: collective.
        deterministic: the same bits from run to run.

    Raises:
        Refused: it cannot be used; on every rank alike.
    """

    on_gpu = True

    def __init__(self, comm: MPI.Intracomm, deterministic: bool) -> None:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
            torch.use_deterministic_algorithms(True, warn_only=True)
        decide_together(comm, _load_cupy, (PlacementError,))
        from collectives.mpi_cuda import select_device

        number = select_device(comm)

        def use() -> None:
            torch.cuda.set_device(number)
            if problem := gpu_problem():
                raise PlacementError(f"training on a GPU: {problem}")
            torch.zeros(1, device="cuda").add_(1).cpu()

        decide_together(comm, use, (RuntimeError,))
        self.device = torch.device("cuda", number)
        self.description = torch.cuda.get_device_name(number)
        # convolutions have fixed shapes here, so that the search for their fastest algorithm pays
        torch.backends.cudnn.benchmark = not deterministic

    def range(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        last = marks[-1]
        last.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks]


def find_placement(wanted: str, comm: MPI.Intracomm, *, deterministic: bool = False) -> Placement:
    """This rank's device; collective.

    Args:
        wanted: "cpu", "cuda", or "auto": a GPU where torch has one to use.
        comm: the ranks that train together.
        deterministic: the same bits from run to run on a GPU too, at the price of speed.

    Raises:
        Refused: there is none, or the ranks would not all compute on the same kind; on every rank alike.
    """
    kind = decide_together(comm, lambda: _kind(wanted), (PlacementError,))
    kinds = comm.allgather(kind)
    if len(set(kinds)) > 1:
        devices = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise Refused(
            f"training.device {wanted!r} means different devices ({devices}): set it to 'cpu' or 'cuda'"
        )
    return (CudaPlacement if kind == "cuda" else Placement)(comm, deterministic)


def _kind(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise PlacementError(
            f"training.device is 'cuda', but torch {torch.__version__}, {built}, sees no GPU"
        )
    return "cuda" if available and wanted != "cpu" else "cpu"


def _load_cupy() -> None:
    """Import what selects the GPU, before there is a CUDA context on another one."""
    try:
        from collectives import mpi_cuda as device_transport

        device_transport.cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a broken installation raises whatever it likes
        raise PlacementError(f"training on a GPU: {gpu_problem() or error}") from error
