"""Ok-Topk: O(k) words whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import balance_and_allgatherv
from collectives.sparse import SparseVector
from collectives.split_and_reduce import RegionLists, split_and_reduce
from collectives.transport import Transport
from oktopk.methods.among_peers import P2PExecutor
from oktopk.methods.base import Deferred, Plan, Reduction, SparseMethod
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
        messages = self.p2p_unavailable_reason(settings)
        kernels_of_peers: Any = None if messages else kernels.peer_step(transport, length, settings)
        self._peers = None if kernels_of_peers is None else P2PExecutor(self, kernels_of_peers)

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        if not settings.balanced_regions:
            return "regions that are not balanced do not fit the lists among peers"
        return "" if settings.rotate else "an order of rounds is of no meaning among peers"

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        if self._peers is None:
            return super().reduce(gradient, residual, out, plan)
        assert residual is not None
        return self._peers.reduce(gradient, residual, out, plan)

    def exchange(self, selection: Selection, out: NDArray[np.float32], plan: Plan) -> Reduction:
        packed, transport, timer = selection.packed, self.transport, plan.timer
        points = selection.points
        if plan.new_boundaries or self.boundaries is None:
            self.boundaries = self._new_boundaries(packed)
            points = None
            timer.record("boundaries")
        lists = split_and_reduce(
            packed,
            self.boundaries,
            transport,
            flag=selection.nonfinite > 0,
            offsets=points,
            bucket_rounds=self.settings.bucket_rounds,
            rotate=self.settings.rotate,
        )
        timer.record("exchange")
        return self.keep_and_gather(lists, selection, plan)

    def keep_and_gather(self, lists: RegionLists, selection: Selection, plan: Plan) -> Reduction:
        """Sum the region, keep what reaches the global threshold, and gather it everywhere."""
        kept, counts = self.threshold.keep(lists, plan.k, plan.exact, plan.timer.record)
        plan.timer.record("reduce")
        trigger = self.settings.balance_trigger
        update = balance_and_allgatherv(kept, counts, self.length, self.transport, trigger)
        plan.timer.record("allgather")
        return self.reduction(selection, update)

    def reduction(
        self, selection: Selection, update: SparseVector, finish: Callable[[], None] | None = None
    ) -> Reduction:
        return Reduction(
            update=update,
            selected=selection.packed,
            only_applied=True,
            returned=(),
            exact=selection.exact or self.threshold.exact,
            local_nnz=selection.packed.nnz,
            global_nnz=update.nnz,
            local_threshold=selection.threshold,
            global_threshold=self.threshold.value,
            finish=finish,
        )

    def close(self) -> None:
        if self._peers is not None:
            self._peers.kernels.close()

    def regions(self, plan: Plan) -> NDArray[np.int64] | None:
        return None if plan.new_boundaries else self.boundaries

    def _new_boundaries(self, packed: SparseVector) -> NDArray[np.int64]:
        if not self.settings.balanced_regions:
            return equal_boundaries(self.length, self.transport.size)
        return region_boundaries(self.cuts(packed), self.length, self.transport)

    def cuts(self, packed: SparseVector) -> NDArray[np.int64]:
        """int64[P - 1], where this rank's selection splits into equal counts."""
        return self.transport.kernels.equal_count_splits(packed.entries, self.length, self.transport.size)

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> Any:
        boundaries = state["boundaries"]
        agreed = state["threshold"], None if boundaries is None else [int(cut) for cut in boundaries]
        return *agreed, state.get("last_cuts") is None

    def state_dict(self) -> dict[str, Any]:
        peers = self._peers
        kept = self.boundaries is not None and not (peers and peers.stale_regions)
        boundaries = self.boundaries.copy() if kept else None  # type: ignore[union-attr]
        cuts = peers.last_cuts if peers else None
        return super().state_dict() | {
            "threshold": self.threshold.state_dict(),
            "boundaries": boundaries,
            "last_cuts": None if cuts is None else cuts.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.threshold.load_state_dict(state["threshold"])
        boundaries, cuts = state["boundaries"], state.get("last_cuts")  # an earlier version has no cuts
        # those of another number of ranks are agreed on anew
        fits = boundaries is not None and len(boundaries) == self.transport.size + 1
        self.boundaries = np.array(boundaries, np.int64) if fits else None
        if self._peers is not None:
            fits = cuts is not None and len(cuts) == self.transport.size - 1
            self._peers.last_cuts = np.array(cuts, np.int64) if fits else None
