"""Where the bench runs: all that differs between kinds of device, and nothing else does."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass
class Growth:
    """What the code in a `watch` allocated on top of what was there, at its peak.

    Attributes:
        allocated: bytes asked for through the arrays' allocator; repeats exactly.
        resident: bytes by which the process grew, whoever asked for them; None where the system does not tell.
    """

    allocated: int = 0
    resident: int | None = None


class Device(Protocol):
    """What a device must offer."""

    name: str

    def place(self, gradient: NDArray[np.float32]) -> Any:
        """The gradient where the reducers want it; called outside the timed region."""
        ...

    def fetch(self, update: Any) -> NDArray[np.float32]:
        """A reducer's update on the host; called outside the timed region."""
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


class Host:
    """The CPU and its memory."""

    name = "cpu"

    def place(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        """Nothing to do."""
        return gradient

    def fetch(self, update: NDArray[np.float32]) -> NDArray[np.float32]:
        """Nothing to do."""
        return update

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


DEVICES: dict[str, type[Host]] = {"cpu": Host}
"""The devices that can be benched, by the name that `--device` takes."""


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
