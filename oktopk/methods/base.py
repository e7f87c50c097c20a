"""The one shape of all methods: an accumulated gradient in, a summed update and what to clear out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import SparseVector
from collectives.transport import FlaggedRanksError, Transport
from oktopk.results import StageTimer
from oktopk.selection import LocalSelection, Selection
from oktopk.settings import Settings


@dataclass(slots=True)
class Plan:
    """What one step is asked to do, equal on all ranks.

    Attributes:
        k: entries wanted.
        exact: name exact thresholds.
        new_boundaries: agree on new region boundaries.
        scale: factor on the sum for methods that write a dense update.
        timer: books the time of the stages.
        nonfinite: this rank knows already, and alone, that the step must not be applied.
        support: where `out` is not zero, None for anywhere.
        clear_out: zeroes it there; every method calls it before it writes there, or does as much itself.
        velocity: float32[n], cleared where the residual is, by methods that apply; None without momentum correction.
        deferrable: the step may end as a Deferred one.
    """

    k: int
    exact: bool
    new_boundaries: bool
    scale: float
    timer: StageTimer
    support: SparseVector | None
    clear_out: Callable[[], None]
    nonfinite: bool = False
    velocity: Any = None
    deferrable: bool = False


@dataclass(slots=True)
class Reduction:
    """What one step gave, before it is applied.

    Attributes:
        update: the sum over the ranks, equal on all of them; None when `out` was filled with it, scaled.
        selected: what this rank packed and sent: its residual becomes zero there; None for everywhere.
        only_applied: it becomes zero only where `update` has an entry too; what was selected but rejected stays.
        returned: lists of entries to add to this rank's residual: what was pruned on the way.
        exact: a threshold was named exactly, planned or because a count missed.
        local_nnz, global_nnz: entries selected here, and applied.
        local_threshold, global_threshold: magnitudes, NaN where there is none.
        finish: None, or nothing is left to apply: `out`, residual and velocity will be as they shall be when the stream gets
            there; to be called once the host has done its part.
        aided: the host had to help even so, as it could not have a deferred step.
    """

    update: SparseVector | None
    selected: SparseVector | None
    returned: tuple[SparseVector, ...]
    exact: bool
    local_nnz: int
    global_nnz: int
    only_applied: bool = False
    local_threshold: float = math.nan
    global_threshold: float = math.nan
    finish: Callable[[], None] | None = None
    aided: bool = False


@dataclass(slots=True)
class Deferred:
    """A step that is on its way on the device, and ends without the host.

    Attributes:
        settle: waits for what was decided, and for no kernel after that; None where nothing was applied, and all stays in the
            residual, on every rank alike. Not collective; to be called once, before the next step. Raises FlaggedRanksError as
            `Method.reduce` does.
    """

    settle: Callable[[], Reduction | None]


class Method(ABC):
    """A gradient allreduce on one transport.

    Args:
        length: elements of the gradient (n).
        transport: where the ranks meet.
        kernels: the module of kernels that fits the arrays.
        settings: equal on all ranks.

    Attributes:
        boundaries: int64[P + 1], the regions that the last step was split by; None for a method or a step without.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = True
    """Whether it leaves entries behind, so that it needs a residual."""

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        self.length = length
        self.transport = transport
        self.kernels = kernels
        self.settings = settings
        self.boundaries: NDArray[np.int64] | None = None

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        """Why kernels of different ranks have nothing to read from each other, "" if they do where they can."""
        return f"{cls.name} exchanges by messages alone"

    @abstractmethod
    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        """Reduce gradient + residual over the ranks. Collective: every rank must call, with the same plan.

        Args:
            gradient: float32[n], unchanged.
            residual: float32[n], what earlier steps left; None counts as zero. Sparse methods need it, and leave
                gradient + residual in it.
            out: float32[n], zero once `plan.clear_out` was called; a method whose result is dense writes it here.

        Raises:
            FlaggedRanksError: a sum is NaN or Inf on the ranks it names; on every rank alike. The residual is as it
                was, to rounding.
        """

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> Any:
        """What of a `state_dict` must be equal on all ranks, as a plain value."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and arrays that the next step depends on, besides the residual."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - dense has no state
        """Continue from a `state_dict`."""

    def close(self) -> None:  # noqa: B027 - most methods hold nothing of MPI's
        """Free what MPI holds for this method."""


class SparseMethod(Method):
    """A method that starts from a local selection."""

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        super().__init__(length, transport, kernels, settings)
        self.selection = LocalSelection(length, kernels, transport)

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        assert residual is not None, f"{self.name} needs a residual"
        plan.clear_out()
        plan.timer.record("apply")
        selection = self.selection.select(gradient, residual, plan.k, plan.exact, self.regions(plan))
        if plan.nonfinite:
            selection = replace(selection, nonfinite=selection.nonfinite + 1)
        plan.timer.record("select")
        return self.exchange_or_undo(selection, gradient, residual, out, plan)

    def exchange_or_undo(
        self,
        selection: Selection,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32],
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction:
        """`exchange`; the gradient leaves the residual where a rank raised its flag."""
        try:
            return self.exchange(selection, out, plan)
        except FlaggedRanksError:
            self.kernels.undo_accumulate(gradient, residual)
            raise

    def gather_counts(self, mine: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[P, m] of every rank's counts, the last of which is its flag. Collective.

        Raises:
            FlaggedRanksError: a rank raised its flag; on every rank alike.
        """
        counts = self.transport.allgather_control(mine)
        if counts[:, -1].any():
            raise FlaggedRanksError(np.flatnonzero(counts[:, -1]).tolist())
        return counts

    def regions(self, plan: Plan) -> NDArray[np.int64] | None:
        """int64[P + 1], the regions that the selection will be split by, where they are known before."""
        return None

    @abstractmethod
    def exchange(self, selection: Selection, out: NDArray[np.float32], plan: Plan) -> Reduction:
        """Turn every rank's selection into the update. Collective.

        Args:
            selection: what this rank selected.
            out: float32[n], zero; where a result that is dense goes, scaled.
            plan: k and scale.

        Raises:
            FlaggedRanksError: a selection has non-finite elements; on every rank alike, before any payload is sent.
        """

    def state_dict(self) -> dict[str, Any]:
        return {"selection": self.selection.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.selection.load_state_dict(state["selection"])
