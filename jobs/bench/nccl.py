"""NCCL's dense allreduce through torch.distributed as a method of the bench."""

from __future__ import annotations

import importlib.util
import socket
import sys
from typing import Any

from mpi4py import MPI

from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.measure import LibraryAllreduce
from jobs.cluster.agreement import require


def torch_problem() -> str:
    """Why NCCL cannot be used in this process, and what to do; "" if it can. Talks to no other rank."""
    needed = "NCCL's rows need a torch with CUDA"
    if importlib.util.find_spec("torch") is None:
        return f"{needed}, and no torch is installed: install one, or name other --methods"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"{needed}, and the one installed cannot be imported: {error}"
    if not torch.cuda.is_available():
        return (
            f"{needed}, and torch {torch.__version__} sees no GPU: install another, or name other --methods"
        )
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return f"{needed} and NCCL, and torch {torch.__version__} is built without NCCL"
    return ""


def require_nccl(comm: MPI.Intracomm) -> None:
    """Raises BenchError on every rank alike where NCCL cannot be used on some rank. Collective."""
    require(comm, torch_problem, BenchError)


def join(comm: MPI.Intracomm) -> None:
    """Make the ranks NCCL's process group, once a process, on the GPUs that are current. Collective."""
    import cupy
    import torch

    from jobs.train.reduce.background import start_process_group

    if torch.distributed.is_initialized():
        return
    number = cupy.cuda.Device().id
    torch.cuda.set_device(number)
    unit = f"{socket.gethostname()} {cupy.cuda.runtime.deviceGetPCIBusId(number)}"
    start_process_group(comm, torch.device("cuda", number), "nccl", unit)


def leave() -> None:
    """End the process group, if there is one. Collective."""
    if "torch" in sys.modules:
        from jobs.train.reduce.background import stop_process_group

        stop_process_group()


class NcclAllreduce(LibraryAllreduce):
    """The average in place by one call of NCCL, which a step only asks for; the device's `finish` waits.

    Args:
        comm, length: as LibraryAllreduce, with one GPU per rank.
        method: a name in NCCL_ROWS.

    Memory: the gradient itself, n elements; what NCCL takes besides is its own affair.
    """

    def __init__(self, comm: MPI.Intracomm, length: int, method: str = "nccl") -> None:
        import cupy
        import torch

        join(comm)
        super().__init__(comm, length, method)
        kind = getattr(torch, NCCL_ROWS[method])
        self._gradient = torch.zeros(length, dtype=kind, device=torch.device("cuda", cupy.cuda.Device().id))
        bits = self._gradient if kind == torch.float32 else self._gradient.view(torch.uint16)
        self.update: Any = cupy.from_dlpack(bits)
        """The gradient, then the average; bfloat16 as its bits."""
        self._all_reduce = torch.distributed.all_reduce
        self._average = torch.distributed.ReduceOp.AVG
        self.width = self._gradient.element_size() / 4

    def load(self, gradient: Any) -> Any:
        """Copy a gradient of any type (bfloat16 as its bits) to where it is summed in place; outside the timed region."""
        import torch

        source = torch.from_dlpack(gradient)
        if source.dtype == torch.uint16:
            source = source.view(torch.bfloat16)
        self._gradient.copy_(source)
        return self.update

    def _reduce(self, gradient: Any) -> None:
        assert gradient is self.update, "load the gradient first"
        self._all_reduce(self._gradient, op=self._average)

    def close(self) -> None:
        """The process group outlives a reducer: `leave` ends it."""
