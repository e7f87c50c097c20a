"""The interface of a method: an accumulated gradient in, a summed update out, and what leaves the residual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives.codec import PLAIN, Codec
from collectives.errors import FlaggedRanksError
from collectives.sparse import Kernels, SparseVector, Vector
from collectives.transport import Transport
from oktopk.selection import LocalSelection, Selection
from oktopk.settings import Settings
from oktopk.shard_group import WHOLE, ShardGroup
from oktopk.step import Addend, Plan, StepResult


class Method(ABC):
    """A gradient allreduce on one transport.

    Args:
        length: elements of the gradient (n).
        transport: where the ranks meet.
        kernels: the module of kernels that fits the arrays.
        settings: equal on all ranks.
        shard_group: the ranks that hold the shards of what this rank's vector is a shard of.

    Attributes:
        length, transport, kernels, settings, shard_group: as given, for the `reduce` or `exchange`
            of a class that is derived.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool] = True
    """Whether it leaves entries behind, so that it needs a residual."""
    writes_out: ClassVar[bool] = True
    """Whether `reduce` may write to `out`. False: `out` is None, as the last step's update may still lie there. A method that is
    derived from such a one, and writes to `out`, sets it to True again."""
    coded: ClassVar[bool] = False
    """Whether its entries may travel in another way than plain."""
    codec: Codec = PLAIN
    """How they travel."""
    over_grid: ClassVar[bool] = False
    """Whether its entries may go to the ranks that sum them over a grid of ranks."""
    hides_work: bool = False
    """Whether `reduce` calls `plan.meanwhile` once while the first messages are on the wire, unless it raises before."""

    def __init__(
        self,
        length: int,
        transport: Transport,
        kernels: Kernels,
        settings: Settings,
        shard_group: ShardGroup = WHOLE,
    ) -> None:
        self.length = length
        self.transport = transport
        self.kernels = kernels
        self.settings = settings
        self.shard_group = shard_group

    @property
    def reads_displacements(self) -> bool:
        """Whether `reduce` reads a gradient by the kernels' `accumulate_select` and `undo_accumulate` alone."""
        return False

    @property
    def boundaries(self) -> NDArray[np.int64] | None:
        """int64[P + 1], the regions that the last step was split by; None for a method or a step without."""
        return None

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        """Why the method has no kernels that read other ranks' memory; "" if it has."""
        return f"{cls.name} exchanges messages only"

    @classmethod
    def local_k(cls, k: int, ranks: int) -> int:
        """Entries that each rank is to select where k are wanted."""
        return k

    @classmethod
    def flat_reason(cls) -> str:
        """Why the method cannot reduce shards between hosts; "" if it can."""
        return f"{cls.name} has flat steps only"

    def prepare(self, out: Vector) -> None:  # noqa: B027 - most methods take memory as they need it
        """Take the memory that every step needs; `out` is the one of all steps."""

    @abstractmethod
    def reduce(
        self,
        gradient: Addend,
        residual: Vector | None,
        out: Vector | None,
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        """Reduce gradient + residual over the ranks by messages. Collective: every rank must call, with the same plan.

        Args:
            gradient: float32[n], unchanged.
            residual: float32[n], what earlier steps left; None counts as zero. Sparse methods need it, and leave
                gradient + residual in it.
            out: float32[n], zero where the method is sparse, if need be after `plan.meanwhile`; a method whose result is dense
                writes it here, scaled. May be None where not `writes_out`.
            overflowed: this rank knows already that its gradient is not finite.

        Raises:
            FlaggedRanksError: gradient + residual is NaN or Inf on the ranks it names, or the sum over the ranks is, and it
                names none; on every rank alike. The residual is as it was, to rounding.
            ValueError: entries did not decode, see `balance_and_allgatherv`. The residual is as it was, to rounding.
        """

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> object:
        """What of a `state_dict` must be equal on all ranks, as a plain value."""
        return None

    @classmethod  # noqa: B027 - a method may keep nothing
    def check_state(cls, state: dict[str, Any], length: int) -> None:
        """Raise StateError where a `state_dict` cannot be loaded; KeyError where it lacks a key."""

    @property
    def sends_control(self) -> bool:
        """Whether every step exchanges control words, which take a token along."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and arrays that the next step depends on, besides the residual."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - dense has no state
        """Continue from a `state_dict`."""

    def check(self) -> None:
        """Raise RuntimeError where the last step did not end well on one rank alone, this one or another; overrides call it."""
        if self.codec.gathered_damage:
            raise RuntimeError("entries that the last step gathered are damaged, and the update lacks them")

    def close(self) -> None:  # noqa: B027 - most methods hold nothing of MPI's
        """Free what MPI holds for this method."""


class SparseMethod(Method):
    """A method that starts from a local selection."""

    selection_type: ClassVar[type[LocalSelection]] = LocalSelection

    def __init__(
        self,
        length: int,
        transport: Transport,
        kernels: Kernels,
        settings: Settings,
        shard_group: ShardGroup = WHOLE,
    ) -> None:
        super().__init__(length, transport, kernels, settings, shard_group)
        self.selection = self.selection_type(length, kernels, transport, shard_group)

    @property
    def reads_displacements(self) -> bool:
        own = type(self).reduce is SparseMethod.reduce
        return own and self.selection_type.select is LocalSelection.select

    def reduce(
        self,
        gradient: Addend,
        residual: Vector | None,
        out: Vector | None,
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        assert residual is not None, f"{self.name} needs a residual"
        regions = self.regions_of_step(plan)
        with plan.timer.stage("select"):
            selection = self.selection.select(gradient, residual, plan.k, plan.exact, regions)
            all_added = not selection.nonfinite
            if overflowed:
                selection = replace(selection, flag=True)
        try:
            return self.exchange(selection, out, plan)
        except (FlaggedRanksError, ValueError):
            self.kernels.undo_accumulate(gradient, residual, all_added)
            raise

    def gather_counts(self, selection: Selection) -> NDArray[np.int64]:
        """int64[P], the entries that every rank selected. Collective.

        Raises:
            FlaggedRanksError: some ranks' elements are not finite; on every rank alike.
        """
        own = np.array([selection.packed.nnz, selection.flagged], np.int64)
        counts, flags = self.transport.allgather_control(own).T
        if flags.any():
            raise FlaggedRanksError(np.flatnonzero(flags).tolist())
        return counts

    def result(self, selection: Selection, update: SparseVector | None, **more: Any) -> StepResult:
        """The result of a step that applied `update`. `more`: fields of `StepResult`."""
        result = StepResult(update, selection.packed, **more)
        result.local_exact, result.local_threshold = selection.exact, selection.threshold
        result.local_nnz = selection.packed.nnz
        if update is not None:
            result.global_nnz = update.nnz
        return result

    def regions_of_step(self, plan: Plan) -> NDArray[np.int64] | None:
        """int64[P + 1], the regions to split the selection by; None for a method without. Collective where they change."""
        return None

    @abstractmethod
    def exchange(self, selection: Selection, out: Vector | None, plan: Plan) -> StepResult:
        """Turn every rank's selection into the update. Collective.

        Args:
            selection: what this rank selected.
            out: float32[n], zero; where a result that is dense goes, scaled. May be None where not `writes_out`.
            plan: k and scale.

        Raises:
            FlaggedRanksError: a selection has non-finite elements, and no payload was sent; or the sum over the ranks is not
                finite, and it names no rank. On every rank alike.
        """

    @classmethod
    def check_state(cls, state: dict[str, Any], length: int) -> None:
        cls.selection_type.check_state(state["selection"])

    def state_dict(self) -> dict[str, Any]:
        return {"selection": self.selection.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.selection.load_state_dict(state["selection"])
