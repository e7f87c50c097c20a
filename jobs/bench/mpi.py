"""The MPI library's own Allreduce as a method of the bench."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from jobs.bench.document import BenchError
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
