"""Dense allreduces of libraries in the bench: MPI's own, and NCCL's through torch.distributed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from jobs.bench.document import NCCL_ROWS
from jobs.bench.measure import LibraryAllreduce


class MpiAllreduce(LibraryAllreduce):
    """The sum by one call of MPI, on a duplicate of the communicator, by the algorithm that MPI chooses.

    Args:
        comm, length: as LibraryAllreduce.

    Memory: n words of update; what the library takes besides is its own affair, and measured.
    """

    def __init__(self, comm: MPI.Intracomm, length: int) -> None:
        super().__init__(comm, length, "mpi")
        self.update: NDArray[np.float32] = np.zeros(length, np.float32)
        self._comm = comm.Dup()

    def _reduce(self, gradient: NDArray[np.float32]) -> None:
        self._comm.Allreduce(gradient, self.update)

    def close(self) -> None:
        self._comm.Free()


def torch_problem() -> str:
    """Why NCCL cannot be used in this process, and what to do; "" if it can. Talks to no other rank."""
    needed = "NCCL's rows need a torch with CUDA"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"{needed}, and none can be imported: {error}: install one, or name other --methods"
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return f"{needed}, and torch {torch.__version__} sees no GPU or has no NCCL: name other --methods"
    return ""


def join_nccl(comm: MPI.Intracomm) -> None:
    """Make the ranks NCCL's process group, once a process, on the GPUs that are current. Collective."""
    import cupy
    import torch

    from jobs.train.reduce.process_group import start_process_group

    if torch.distributed.is_initialized():
        return
    number = cupy.cuda.Device().id
    torch.cuda.set_device(number)
    start_process_group(comm, torch.device("cuda", number))


def leave_nccl() -> None:
    """End the process group, if there is one. Collective."""
    if "torch" in sys.modules:
        from jobs.train.reduce.process_group import stop_process_group

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

        join_nccl(comm)
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
        """The process group outlives a reducer: `leave_nccl` ends it."""
