"""Vectors in memory that all ranks of a host read."""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from collectives.errors import Caught, refuse
from collectives.transport import Transport


class SharedVectors:
    """One float32 vector a rank, in memory that all ranks of a host map. Nothing orders the accesses but the caller.

    The memory is an anonymous file of the first rank, which the others open through /proc: it needs no room in /dev/shm, and
    nothing of it outlives the processes. (An MPI shared-memory window would do the same, with Open MPI's limits and warnings.)

    Args:
        transport: ranks of one host. Collective: every rank must call.
        length: elements of each vector.

    Raises:
        RuntimeError: the ranks cannot map one another's memory; on every rank alike, naming the ranks.

    Attributes:
        rows: float32[P, length and more, to whole pages], C-contiguous; row r is rank r's to write. Zero at first.
    """

    def __init__(self, transport: Transport, length: int) -> None:
        # whole pages, so that rows are aligned
        stride = -(-length * np.dtype(np.float32).itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        file, path, identity = -1, "", (0, 0)
        with Caught() as caught:
            if transport.rank == 0:
                file = os.memfd_create("oktopk")
                os.ftruncate(file, transport.size * stride)
                path, identity = f"/proc/{os.getpid()}/fd/{file}", _identity(file)
        problem, path, identity = transport.allgather_objects((caught.sentence, path, identity))[0]
        try:
            with transport.together_or("no memory that the ranks of a host share", RuntimeError):
                refuse(problem)
                if transport.rank:
                    file = os.open(path, os.O_RDWR)
                    if _identity(file) != identity:  # ranks that number processes differently
                        raise OSError(f"{path} is another file there")
                memory = mmap.mmap(file, transport.size * stride)
        finally:
            if file >= 0:
                os.close(file)  # now that every rank has mapped it
        # freed with the last array that reads it
        self.rows: NDArray[np.float32] = np.frombuffer(memory, np.float32).reshape(transport.size, -1)


def _identity(file: int) -> tuple[int, int]:
    """What no other file of the machine has."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino
