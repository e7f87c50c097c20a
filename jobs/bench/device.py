"""Device interface of the bench, with its CPU implementation."""

from __future__ import annotations

import re
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from jobs.bench.floors import Speeds, measure_speeds
from jobs.bench.gradients import DrawnGradients, GradientSource

DEVICES = ("cpu", "cuda")
"""What `--device` takes."""


@dataclass
class Growth:
    """Peak memory that the code in a `watch` allocated.

    Attributes:
        allocated: bytes asked for through the arrays' allocator; repeats exactly.
        resident: bytes by which the process grew, whoever asked for them; None where the system does not tell.
        synchronizations: times that the host waited for the device; None where there is nothing to wait for.
    """

    allocated: int = 0
    resident: int | None = None
    synchronizations: int | None = None


class Device:
    """The CPU and its memory.

    Attributes:
        name: as `oktopk.GradientAllreduce` takes it.
        asynchronous: work may still go on when the call that asked for it has returned.
        sharers: ranks that share its memory, this one included.
    """

    name = "cpu"
    asynchronous = False

    def __init__(self, sharers: int = 1) -> None:
        self.sharers = sharers

    def source(self, name: str, length: int, rank: int, seed: int) -> GradientSource:
        """Drawn gradients, where the reducers want them; arguments as `jobs.bench.gradients.GradientSource`."""
        return DrawnGradients(name, length, rank, seed)

    def to_device(self, gradient: Any) -> Any:
        """A source's gradient where, and as what, the reducers want it; called outside the timed region."""
        return gradient

    def digest(self, update: Any) -> int:
        """Equal for updates that are bit-identical; called outside the timed region."""
        return zlib.crc32(update.data)

    def finish(self) -> None:
        """Return when all work that was asked for has completed; called inside the timed region."""

    @contextmanager
    def watch(self, traced: bool = True) -> Iterator[Growth]:
        """Measure the memory growth of the block; the Growth is filled in when it ends.

        On the CPU NumPy's and Python's allocations are counted, and the resident set, which sees those of MPI and kernels.

        Args:
            traced: count allocations. Not where threads without the interpreter's lock free them, as gloo's do: they crash when
                tracemalloc ends meanwhile.
        """
        growth = Growth()
        before = _peak_resident_bytes(reset=True)
        if traced:
            tracemalloc.start()
        try:
            yield growth
            growth.allocated = tracemalloc.get_traced_memory()[1]  # 0 where nothing is traced
            after = _peak_resident_bytes(reset=False)
        finally:
            tracemalloc.stop()
        if before is not None and after is not None:
            growth.resident = max(0, after - before)

    def free_bytes(self) -> int | None:
        """Memory that is still to be had, None if unknown."""
        return _kibibytes("/proc/meminfo", "MemAvailable")

    def measure_speeds(self, comm: MPI.Intracomm, length: int) -> Speeds:
        """Measure the speeds that floors are computed from. Collective."""
        return measure_speeds(comm, length)

    def release(self) -> None:
        """Give back what nobody uses any more."""


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
