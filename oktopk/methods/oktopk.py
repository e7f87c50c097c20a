"""Ok-Topk: O(k) words whatever the number of ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.balance_and_allgatherv import balance_and_allgatherv
from collectives.sparse import SparseVector
from collectives.split_and_reduce import split_and_reduce
from collectives.transport import Transport
from oktopk.methods.base import Plan, Reduction, SparseMethod
from oktopk.regions import equal_boundaries, region_boundaries
from oktopk.selection import Selection
from oktopk.settings import Settings
from oktopk.thresholds import GlobalThreshold


class OkTopk(SparseMethod):
    """Balanced split-and-reduce, then balanced allgatherv of the global top k.

    Traffic: between 2k(P-1)/P and 6k(P-1)/P words a rank, at most 2P + 2 log2 P messages.
    Source: Li & Hoefler, PPoPP 2022, algorithm 1.
    """

    name = "oktopk"

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        super().__init__(length, transport, kernels, settings)
        self.threshold = GlobalThreshold(kernels, settings.drift_tolerance)
        self.boundaries: NDArray[np.int64] | None = None

    def exchange(self, selection: Selection, out: NDArray[np.float32], plan: Plan) -> Reduction:
        packed, transport, stopwatch = selection.packed, self.transport, plan.stopwatch
        points = selection.points
        if plan.new_boundaries or self.boundaries is None:
            self.boundaries = self._new_boundaries(packed)
            points = None
            stopwatch.lap("boundaries")
        lists = split_and_reduce(
            packed,
            self.boundaries,
            transport,
            flag=selection.nonfinite > 0,
            points=points,
            bucket_rounds=self.settings.bucket_rounds,
            rotate=self.settings.rotate,
        )
        stopwatch.lap("exchange")
        kept, counts = self.threshold.keep(lists, plan.k, plan.exact)
        stopwatch.lap("reduce")
        update = balance_and_allgatherv(kept, counts, self.length, transport, self.settings.balance_trigger)
        stopwatch.lap("allgather")
        return Reduction(
            update=update,
            selected=packed,
            only_applied=True,
            returned=(),
            exact=selection.exact or self.threshold.exact,
            local_nnz=packed.nnz,
            global_nnz=update.nnz,
            local_threshold=selection.threshold,
            global_threshold=self.threshold.value,
        )

    def regions(self, plan: Plan) -> NDArray[np.int64] | None:
        return None if plan.new_boundaries else self.boundaries

    def _new_boundaries(self, packed: SparseVector) -> NDArray[np.int64]:
        if not self.settings.balanced_regions:
            return equal_boundaries(self.length, self.transport.size)
        cuts = self.transport.kernels.equal_count_cuts(packed.entries, self.length, self.transport.size)
        return region_boundaries(cuts, self.length, self.transport)

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> Any:
        boundaries = state["boundaries"]
        return state["threshold"], None if boundaries is None else [int(cut) for cut in boundaries]

    def state_dict(self) -> dict[str, Any]:
        boundaries = None if self.boundaries is None else self.boundaries.copy()
        return super().state_dict() | {"threshold": self.threshold.state_dict(), "boundaries": boundaries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.threshold.load_state_dict(state["threshold"])
        boundaries = state["boundaries"]
        # boundaries of another number of ranks are agreed on anew
        fits = boundaries is not None and len(boundaries) == self.transport.size + 1
        self.boundaries = np.array(boundaries, np.int64) if fits else None
