"""Ok-Topk: O(k) words whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import make_codec
from collectives.grid import reduce_over_grid
from collectives.sparse import Kernels, SparseVector, Vector
from collectives.split_and_reduce import RegionLists, split_and_reduce
from collectives.transport import Transport
from oktopk.methods.base import SparseMethod
from oktopk.regions import Regions
from oktopk.selection import Selection
from oktopk.settings import Settings
from oktopk.shard_group import WHOLE, ShardGroup
from oktopk.step import Plan, StepResult
from oktopk.thresholds import GlobalThreshold, check_threshold


class OkTopk(SparseMethod):
    """Balanced split-and-reduce, then balanced allgatherv of the global top k.

    Attributes:
        threshold: the global one.
        regions: which rank reduces what.

    Traffic: between 2k(P-1)/P and 6k(P-1)/P words a rank, at most 2P + 2 log2 P messages. Over a grid up to 8k(P-1)/P words, and
        some 4·sqrt(P) + 2 log2 P messages but for balancing.
    Source: Li & Hoefler, PPoPP 2022, algorithm 1.
    """

    name = "oktopk"
    writes_out = False
    coded = True
    over_grid = True

    def __init__(
        self,
        length: int,
        transport: Transport,
        kernels: Kernels,
        settings: Settings,
        shard_group: ShardGroup = WHOLE,
    ) -> None:
        super().__init__(length, transport, kernels, settings, shard_group)
        self.threshold = GlobalThreshold(kernels, settings.drift_tolerance, shard_group)
        self.regions = Regions(length, transport)
        self.codec = make_codec(
            settings.wire, transport.kernels, transport.workspace, transport.size, transport.ranks
        )
        # a host that works moves no messages meanwhile
        self.hides_work = transport.kernels.ASYNCHRONOUS

    @property
    def boundaries(self) -> NDArray[np.int64]:
        return self.regions.boundaries

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        if settings.wire not in ("auto", "plain"):
            return f"steps through peer memory read plain entries, and wire is {settings.wire!r}"
        if settings.exchange == "grid":
            return "steps through peer memory exchange directly, and exchange is 'grid'"
        if not settings.balanced_regions:
            return "steps through peer memory need balanced regions"
        return "" if settings.rotate else "steps through peer memory have no rounds to order"

    @classmethod
    def flat_reason(cls) -> str:
        return ""

    def regions_of_step(self, plan: Plan) -> NDArray[np.int64]:
        if self.regions.are_due(plan.new_boundaries):
            with plan.timer.stage("boundaries"):
                self.regions.renew()
        self.regions.begin(plan.displaced)
        return self.boundaries

    def exchange(self, selection: Selection, out: Vector | None, plan: Plan) -> StepResult:
        settings, codec = self.settings, self.codec
        over_grid = settings.exchange == "grid" and self.transport.grid is not None
        reduce = reduce_over_grid if over_grid else split_and_reduce
        # a device may find only now that what the last step gathered did not decode
        flag = selection.flagged or codec.gathered_damage
        with plan.timer.stage("exchange"):
            lists = reduce(
                selection.packed,
                self.boundaries,
                self.transport,
                flag,
                selection.offsets,
                bucket_rounds=settings.bucket_rounds,
                rotate=settings.rotate,
                codec=codec,
                meanwhile=plan.meanwhile,
            )
        return self.keep_and_gather(lists, selection, plan)

    def keep_and_gather(self, lists: RegionLists, selection: Selection, plan: Plan) -> StepResult:
        """Sum the region, keep what reaches the global threshold, and gather it everywhere."""
        with plan.timer.stage("reduce"):
            kept, counts = self.threshold.keep(lists, plan.k, plan.exact, plan.timer.record)
        trigger, codec = self.settings.balance_trigger, self.codec
        with plan.timer.stage("allgather"):
            update = balance_and_allgatherv(
                kept, counts, self.length, self.transport, trigger, codec, self.boundaries
            )
        errors = (SparseVector(kept, self.length),) if codec.rounds else ()
        return self.result(
            selection,
            update,
            returned=errors,
            rounded=lists.passed if codec.rounds else None,
            errors_stay=codec.rounds,
            rounding=codec.rounding,
        )

    def result(self, selection: Selection, update: SparseVector | None, **more: Any) -> StepResult:
        result = super().result(selection, update, only_applied=True, **more)
        result.global_exact, result.global_threshold = self.threshold.exact, self.threshold.value
        if self.settings.balanced_regions:
            self.regions.learn(self._splits(selection))
        return result

    def _splits(self, selection: Selection) -> NDArray[np.int64] | None:
        """int64[P - 1], the indices that split a selection into equal counts; None where it is empty."""
        entries, kernels = selection.packed.entries, self.transport.kernels
        if not len(entries) or selection.splits is not None:
            return selection.splits if len(entries) else None
        return kernels.equal_count_splits(entries, self.length, self.transport.size)

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> object:
        return state["threshold"], *Regions.agreed_state(state)

    @classmethod
    def check_state(cls, state: dict[str, Any], length: int) -> None:
        super().check_state(state, length)
        check_threshold("global", state["threshold"])
        Regions.check_state(state, length)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"threshold": self.threshold.state_dict()} | self.regions.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.threshold.load_state_dict(state["threshold"])
        self.regions.load_state_dict(state)
