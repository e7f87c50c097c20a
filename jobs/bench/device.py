"""Where the bench runs: all that differs between kinds of device, and nothing else does."""

from __future__ import annotations

import re
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cuda.environment import gpu_problem
from jobs.bench.document import BenchError
from jobs.bench.floors import Speeds, measure_speeds
from jobs.bench.gradients import DrawnGradients, GradientSource


@dataclass
class Growth:
    """What the code in a `watch` allocated on top of what was there, at its peak.

    Attributes:
        allocated: bytes asked for through the arrays' allocator; repeats exactly.
        resident: bytes by which the process grew, whoever asked for them; None where the system does not tell.
        synchronizations: times that the host waited for the device; None where there is nothing to wait for.
    """

    allocated: int = 0
    resident: int | None = None
    synchronizations: int | None = None


class Device(Protocol):
    """What a device must offer.

    Attributes:
        name: as `oktopk.GradientAllreduce` takes it.
        asynchronous: work may still go on when the call that asked for it has returned.
        sharers: ranks that share its memory, this one included.
    """

    name: str
    asynchronous: bool
    sharers: int

    def source(self, name: str, length: int, rank: int, seed: int) -> GradientSource:
        """Drawn gradients, best where the reducers want them; arguments as `jobs.bench.gradients.Draws`."""
        ...

    def place(self, gradient: Any) -> Any:
        """A source's gradient where, and as what, the reducers want it; called outside the timed region."""
        ...

    def fetch(self, update: Any) -> NDArray[Any]:
        """A reducer's update on the host."""
        ...

    def digest(self, update: Any) -> int:
        """Equal for updates that are bit-identical; called outside the timed region."""
        ...

    def finish(self) -> None:
        """Return when all work that was asked for has completed; called inside the timed region."""
        ...

    def watch(self) -> Any:
        """A context manager that gives a Growth, filled in when it ends."""
        ...

    def free_bytes(self) -> int | None:
        """Memory that is still to be had, None if unknown."""
        ...

    def measure_speeds(self, comm: MPI.Intracomm, length: int) -> Speeds:
        """What floors are reckoned by. Collective."""
        ...

    def release(self) -> None:
        """Give back what nobody uses any more."""
        ...


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
        """In host memory."""
        return DrawnGradients(name, length, rank, seed)

    def place(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        """Nothing to do."""
        return gradient

    def fetch(self, update: NDArray[np.float32]) -> NDArray[np.float32]:
        """Nothing to do."""
        return update

    def digest(self, update: NDArray[np.float32]) -> int:
        """A checksum of the bytes."""
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
        """As jobs.bench.floors."""
        return measure_speeds(comm, length)

    def release(self) -> None:
        """Nothing to do: the allocator keeps nothing of this size."""


DEVICES = ("cpu", "cuda")
"""What `--device` takes."""


def open_device(name: str, gradient_type: str, comm: MPI.Intracomm) -> Device:
    """The device of this rank. Collective.

    Raises:
        BenchError: some rank has none; on every rank alike.
    """
    if name == "cpu":
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        sharers = node.size
        node.Free()
        return Host(sharers)
    _agree_on(comm, no_gpu())
    from jobs.bench.gpu.device import open_cuda

    # the first call that makes a context comes after each rank has its GPU
    device = open_cuda(gradient_type, comm)
    _agree_on(comm, gpu_problem())
    return device


def no_gpu() -> str:
    """Why there is no GPU for this process, and what to do; "" if there is one. Makes no context on any."""
    try:
        import cupy

        there = cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # whatever it was, gpu_problem names it
        there = False
    return "" if there else gpu_problem()


def _agree_on(comm: MPI.Intracomm, problem: str) -> None:
    problems = comm.allgather(problem)
    found = list(dict.fromkeys(text for text in problems if text))
    if found:
        which = ", ".join(str(rank) for rank, text in enumerate(problems) if text)
        where = "" if all(problems) else f" on rank(s) {which}"
        raise BenchError(f"--device cuda cannot be used{where}: {'; '.join(found)}")


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
