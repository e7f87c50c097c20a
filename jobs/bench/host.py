"""The CPU as a device of the bench."""

from __future__ import annotations

import re
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from jobs.bench.device import Growth
from jobs.bench.floors import Speeds, measure_speeds
from jobs.bench.gradients import DrawnGradients, GradientSource


class Host:
    """The CPU and its memory.

    Args:
        sharers: ranks on this host.
    """

    name = "cpu"
    asynchronous = False

    def __init__(self, sharers: int = 1) -> None:
        self.sharers = sharers

    def source(self, name: str, length: int, rank: int, seed: int) -> GradientSource:
        return DrawnGradients(name, length, rank, seed)

    def place(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        return gradient

    def fetch(self, update: NDArray[np.float32]) -> NDArray[np.float32]:
        return update

    def digest(self, update: NDArray[np.float32]) -> int:
        return zlib.crc32(update.data)

    def finish(self) -> None:
        """Nothing to wait for: every call blocks."""

    @contextmanager
    def watch(self) -> Iterator[Growth]:
        """Count NumPy's and Python's allocations, and watch the resident set, which sees those of MPI and kernels."""
        growth = Growth()
        before = _peak_resident_bytes(reset=True)
        tracemalloc.start()
        try:
            yield growth
            growth.allocated = tracemalloc.get_traced_memory()[1]
            after = _peak_resident_bytes(reset=False)
        finally:
            tracemalloc.stop()
        if before is not None and after is not None:
            growth.resident = max(0, after - before)

    def free_bytes(self) -> int | None:
        """What the system says is available without swapping."""
        return _kibibytes("/proc/meminfo", "MemAvailable")

    def measure_speeds(self, comm: MPI.Intracomm, length: int) -> Speeds:
        return measure_speeds(comm, length)

    def release(self) -> None:
        """Nothing to do: the allocator keeps nothing of this size."""


def _peak_resident_bytes(*, reset: bool) -> int | None:
    """The process's largest resident set since it was last reset, None where there is no such thing."""
    if reset:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
    return _kibibytes("/proc/self/status", "VmHWM")


def _kibibytes(file: str, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB", Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
