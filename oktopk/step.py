"""One step: what is asked of it, what runs it, and what it gives.

A method says what a step computes, an executor how: over messages, or by kernels that read each other's memory.
`executor.begin(gradient, plan)` gives a handle; `handle.result()` ends the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from collectives.sparse import Array, SparseVector
from oktopk.results import StageTimer

if TYPE_CHECKING:
    from oktopk.cpu.accumulate import ShardSum
    from oktopk.cuda.multi_tensor import ComposedGradient, GradientTensors
    from oktopk.displacement import Displacement

Spans = tuple[tuple[int, int], ...]
"""(begin, end) of elements of a vector, ascending and disjoint."""

Gradient: TypeAlias = "Array | GradientTensors | Displacement"
"""Of one rank, as `GradientAllreduce.step` takes it; an array is [n] of the gradient type."""

Addend: TypeAlias = "Gradient | ShardSum | ComposedGradient"
"""What a step adds to the residual: the gradient of a rank, or a shard of the sum of a host's."""


@dataclass(slots=True)
class Plan:
    """What one step is asked to do, equal on all ranks.

    Attributes:
        k: entries wanted.
        exact: compute exact thresholds.
        new_boundaries: agree on new region boundaries, from what was selected before.
        scale: factor on the sum over the ranks.
        timer: times the stages.
        displaced: the gradient is a `Displacement`.
        may_defer: the step may return before the host knows how it went.
        problem: an error that the caller found on this rank alone, not equal on all ranks: every rank then raises it. It is a
            sentence and no exception, as no rank asks the others in a step (`Transport.together`): the step's own messages take
            along a flag, and only where one is up the sentences follow.
        absent: spans of elements of which this rank has no gradient, not equal on all ranks: what its residual holds there stays.
        token: a word of this rank's that all ranks are to see; None for none.
        meanwhile: work for a device while messages are on the wire, of a method that takes it; see `Method.hides_work`.
    """

    k: int
    exact: bool
    new_boundaries: bool
    scale: float
    timer: StageTimer
    displaced: bool = False
    may_defer: bool = False
    problem: str = ""
    absent: Spans = ()
    token: int | None = None
    meanwhile: Callable[[], object] | None = None


@dataclass(slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        update: the sum over the ranks, equal on all of them; None where the whole vector was written, scaled.
        selected: the entries that this rank sent, for `union` at every index that any rank packed. They leave the residual. None:
            all of it.
        errors_stay: the values of `selected` are rounding errors, which the residual becomes instead of zero.
        returned: lists of entries to add to this rank's residual: what was pruned or rounded away on the way.
        rounded: entries to add to it where `update` has an entry too: what this rank rounded away of sums that it passed on.
        rounding: as in `StepReport`.
        local_exact, global_exact: as in `StepReport`.
        local_nnz, global_nnz: entries selected here, and applied.
        only_applied: the residual becomes zero only where `update` has an entry too; what was selected but rejected stays.
        local_threshold, global_threshold: magnitudes, NaN where there is none.
        deferrable: the device ended the step without the host; one like it may be deferred.
        given_up: nothing was applied; the gradient stays in the residual, on every rank alike.
        tokens: those of the plans of all ranks, see `collectives.tokens`; None where they are not known.
    """

    update: SparseVector | None
    selected: SparseVector | None
    returned: tuple[SparseVector, ...] = ()
    rounded: SparseVector | None = None
    errors_stay: bool = False
    rounding: tuple[float, float] = (0.0, 0.0)
    local_exact: bool = False
    local_nnz: int = 0
    global_nnz: int = 0
    only_applied: bool = False
    local_threshold: float = math.nan
    global_threshold: float = math.nan
    global_exact: bool = False
    deferrable: bool = False
    given_up: bool = False
    tokens: tuple[int, ...] | None = None


class StepHandle(Protocol):
    """A step that has begun.

    Attributes:
        deferred: the caller may go on, and call `result` when the next step begins.
    """

    deferred: bool

    def abort(self) -> None:
        """End the step's kernels on all ranks, since this rank does not end the step; its later steps raise RuntimeError."""

    def result(self) -> StepResult:
        """Wait for what the ranks decided, and end the step: update and residual are final. To be called once.

        Raises:
            FlaggedRanksError: a gradient was not finite on the ranks it names, or the sum over the ranks was not, and it names
                none; on every rank alike. Nothing was applied; the residual is as before, to rounding.
        """


@dataclass(slots=True)
class CompletedStep:
    """The handle of a step that ended while it began."""

    ended: StepResult
    deferred: bool = False

    def abort(self) -> None:
        """Nothing to end."""

    def result(self) -> StepResult:
        return self.ended


class Executor(Protocol):
    """Runs the steps of one method."""

    def begin(self, gradient: Gradient, plan: Plan) -> StepHandle:
        """Start everything of a step that needs no answer from the host. Collective: every rank must call, with the same plan.

        Args:
            gradient: [n], as `Backend.validate` returns it; read, and unchanged until the handle's result is known.

        Raises:
            FlaggedRanksError: as `StepHandle.result`.
            ValueError, RuntimeError: the plan has a problem on some rank; on every rank, in this step or in the next one.
        """

    def check(self) -> None:
        """Raise RuntimeError if a step ended on some rank only, so that what this one holds must not be kept."""

    def close(self) -> None:
        """Free what the executor holds of MPI and of the device. Collective."""
