"""Ok-Topk: O(k) words whatever the number of ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import make_codec
from collectives.sparse import SparseVector
from collectives.split_and_reduce import RegionLists, split_and_reduce
from collectives.transport import Transport
from oktopk.methods.base import SparseMethod
from oktopk.regions import Regions, equal_boundaries
from oktopk.selection import Selection
from oktopk.settings import Settings
from oktopk.step import Plan, StepResult
from oktopk.thresholds import GlobalThreshold, check_threshold


class OkTopk(SparseMethod):
    """Balanced split-and-reduce, then balanced allgatherv of the global top k.

    Attributes:
        threshold: the global one.
        regions: which rank reduces what.

    Traffic: between 2k(P-1)/P and 6k(P-1)/P words a rank, at most 2P + 2 log2 P messages.
    Source: Li & Hoefler, PPoPP 2022, algorithm 1.
    """

    name = "oktopk"
    writes_out = False
    coded = True

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        super().__init__(length, transport, kernels, settings)
        self.threshold = GlobalThreshold(kernels, settings.drift_tolerance)
        self.regions = Regions(length, transport)
        self.codec = make_codec(
            settings.wire, transport.kernels, transport.workspace, transport.size, transport.ranks
        )
        # a host that works moves no messages meanwhile
        self.hides_work = transport.kernels.ASYNCHRONOUS

    @property
    def boundaries(self) -> NDArray[np.int64] | None:
        return self.regions.boundaries

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        if settings.wire not in ("auto", "plain"):
            return f"steps through peer memory read plain entries, and wire is {settings.wire!r}"
        if not settings.balanced_regions:
            return "steps through peer memory need balanced regions"
        return "" if settings.rotate else "steps through peer memory have no rounds to order"

    @classmethod
    def flat_reason(cls) -> str:
        return ""

    def known_regions(self, plan: Plan) -> NDArray[np.int64] | None:
        return None if plan.new_boundaries else self.boundaries

    def exchange(self, selection: Selection, out: NDArray[np.float32] | None, plan: Plan) -> StepResult:
        packed, regions, timer = selection.packed, self.regions, plan.timer
        offsets = selection.offsets
        if plan.new_boundaries or regions.boundaries is None:
            offsets = None
            with timer.stage("boundaries"):
                if self.settings.balanced_regions:
                    regions.renew(self.splits(packed))
                else:
                    regions.boundaries = equal_boundaries(self.length, self.transport.size)
        regions.splits = None  # messages do not need them, and they would be of another step
        assert regions.boundaries is not None
        rounds, rotate, codec = self.settings.bucket_rounds, self.settings.rotate, self.codec
        # a device may find only now that what the last step gathered did not decode
        flag = selection.flagged or codec.gathered_damage
        with timer.stage("exchange"):
            lists = split_and_reduce(
                packed,
                regions.boundaries,
                self.transport,
                flag,
                offsets,
                bucket_rounds=rounds,
                rotate=rotate,
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
                kept, counts, self.length, self.transport, trigger, codec, self.regions.boundaries
            )
        errors = (SparseVector(kept, self.length),) if codec.rounds else ()
        return self.result(
            selection, update, returned=errors, errors_stay=codec.rounds, rounding=codec.rounding
        )

    def result(self, selection: Selection, update: SparseVector | None, **more: Any) -> StepResult:
        result = super().result(selection, update, only_applied=True, **more)
        result.global_exact, result.global_threshold = self.threshold.exact, self.threshold.value
        return result

    def splits(self, packed: SparseVector) -> NDArray[np.int64]:
        """int64[P - 1], the indices that split this rank's selection into equal counts."""
        return self.transport.kernels.equal_count_splits(packed.entries, self.length, self.transport.size)

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> Any:
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
