"""Dense allreduces of libraries in the bench: MPI's own, and NCCL's through torch.distributed."""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.measure import LibraryAllreduce

ALGORITHMS: dict[str, int | None] = {"mpi": None, "mpi-ring": 4, "mpi-rabenseifner": 6}
"""Method -> its number in Open MPI's `coll_tuned_allreduce_algorithm`; None leaves the choice to the library."""


class MpiAllreduce(LibraryAllreduce):
    """The sum by one call of MPI, on a duplicate of the communicator.

    Args:
        comm, length: as LibraryAllreduce.
        method: a name in ALGORITHMS.

    Raises:
        BenchError: the algorithm cannot be chosen here; on every rank alike.

    Memory: n words of update; what the library takes besides is its own affair, and measured.
    """

    def __init__(self, comm: MPI.Intracomm, length: int, method: str = "mpi") -> None:
        super().__init__(comm, length, method)
        self.update: NDArray[np.float32] = np.zeros(length, np.float32)
        algorithm = ALGORITHMS[method]
        if algorithm is None:
            self._comm = comm.Dup()
        else:
            with _tuned_algorithm(algorithm, method):
                self._comm = comm.Dup()  # a communicator keeps the algorithm that it was made under

    def _reduce(self, gradient: NDArray[np.float32]) -> None:
        self._comm.Allreduce(gradient, self.update)

    def close(self) -> None:
        self._comm.Free()


@contextmanager
def _tuned_algorithm(number: int, method: str) -> Iterator[None]:
    """Let Open MPI give communicators that are made in the block this allreduce algorithm."""
    library = _loaded_library()
    level = ctypes.c_int()
    # the level that MPI has: Open MPI takes a lower one for its own from then on
    if library is None or library.MPI_T_init_thread(MPI.Query_thread(), ctypes.byref(level)):
        raise BenchError(f"method {method!r}: this MPI has no tool interface to choose the algorithm by")

    def handle(name: str) -> ctypes.c_void_p:
        """Handle of a control variable of MPI's tool interface, which mpi4py lacks."""
        index, count, found = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        if library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)):
            raise LookupError(name)
        if library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(found), ctypes.byref(count)):
            raise LookupError(name)
        return found

    try:
        forced, algorithm = handle("coll_tuned_use_dynamic_rules"), handle("coll_tuned_allreduce_algorithm")
    except LookupError as missing:
        words = MPI.Get_library_version().splitlines()[0].rstrip("\0")
        raise BenchError(f"method {method!r} needs Open MPI: {words!r} has no {missing}") from None
    before = (forced, ctypes.c_bool()), (algorithm, ctypes.c_int())
    for variable, value in before:
        library.MPI_T_cvar_read(variable, ctypes.byref(value))
    library.MPI_T_cvar_write(forced, ctypes.byref(ctypes.c_bool(True)))
    library.MPI_T_cvar_write(algorithm, ctypes.byref(ctypes.c_int(number)))
    try:
        yield
    finally:
        for variable, value in before:
            library.MPI_T_cvar_write(variable, ctypes.byref(value))


def _loaded_library() -> ctypes.CDLL | None:
    """The MPI library of this process, found among what it has mapped."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libmpi.so" in line}
    return ctypes.CDLL(sorted(paths)[0]) if paths else None


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
    unit = f"{socket.gethostname()} {cupy.cuda.runtime.deviceGetPCIBusId(number)}"
    start_process_group(comm, torch.device("cuda", number), "nccl", unit)


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
