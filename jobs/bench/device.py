"""Device interface of the bench, and what a device reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mpi4py import MPI
from numpy.typing import NDArray

from jobs.bench.floors import Speeds
from jobs.bench.gradients import GradientSource

DEVICES = ("cpu", "cuda")
"""What `--device` takes."""


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
