"""Ok-Topk: O(k) words whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.balance_and_allgatherv import balance_and_allgatherv
from collectives.host_kernels import bits_magnitude
from collectives.sparse import SparseVector
from collectives.split_and_reduce import RegionLists, split_and_reduce
from collectives.transport import FlaggedRanksError, Transport
from oktopk.host_kernels import Packing
from oktopk.methods.base import Deferred, Plan, Reduction, SparseMethod
from oktopk.regions import equal_boundaries, region_boundaries
from oktopk.selection import Selection
from oktopk.settings import Settings, selection_cap
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
        messages = self.keeps_to_messages(settings)
        self._peers: Any = None if messages else kernels.peer_step(transport, length, settings)
        # a region got more than there is room for
        self._stale_regions = False
        # a deferred step stopped at its selection: the kernels of some rank may have yet to read what was selected
        self._stopped_apart = False
        # int64[P - 1], where the last selection splits evenly; known on all ranks or on none
        self._last_cuts: NDArray[np.int64] | None = None

    @classmethod
    def keeps_to_messages(cls, settings: Settings) -> str:
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
        if not self._peers.fits(plan.k):
            self._peers.prepare(plan.k)
        assert residual is not None
        return self._among_peers(gradient, residual, out, plan)

    def _among_peers(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32],
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        """A step through peer memory; what is out of the ordinary goes the way of `exchange`, or is given up where deferred."""
        local, threshold, k = self.selection, self.threshold, plan.k
        if self._stopped_apart:
            # a note of this step would overwrite the one that another rank's kernels have yet to read
            self.transport.comm.Barrier()
            self._stopped_apart = False
        fresh = plan.new_boundaries or self._stale_regions or self.boundaries is None
        exact = plan.exact or threshold.bits is None
        # equal on all ranks, as all of it is
        deferred = plan.deferrable and threshold.bits is not None and not (fresh and self._last_cuts is None)
        selection: Selection | None = None
        given, bits = None, local.bits
        if plan.nonfinite:
            # nothing will be exchanged, and what is given in the velocity's place may be narrower
            selection = local.select(gradient, residual, k, exact=False)
            cuts = self._cuts(selection.packed)
        elif bits is None or (not deferred and (plan.exact or local.exact_due)):
            selection, cuts = self._select_exactly(gradient, residual, k)
        elif not deferred and (fresh or exact):
            selection, cuts = self._select_by(bits, gradient, residual, k)
        exactly = selection is None and (plan.exact or local.exact_due)
        if exactly:
            bits = local.lower_threshold()
        elif selection is not None:
            given, bits = (selection.packed.nnz, selection.nonfinite + plan.nonfinite), 0
            plan.stopwatch.lap("select")
        if fresh:
            if deferred and self._last_cuts is not None:
                # this step's selection is not made yet; regions are for many steps
                cuts = self._last_cuts
            self.boundaries = region_boundaries(cuts, self.length, self.transport)
            self._stale_regions = False
            plan.stopwatch.lap("boundaries")
        peers = self._peers
        peers.launch(
            gradient,
            residual,
            out,
            plan.velocity,
            (bits, threshold.lowest if exact else threshold.expected),
            self.boundaries,
            plan.support,
            plan.clear_out,
            given,
            exact,
            plan.stopwatch.detailed,
            exactly,
            deferred,
        )
        if deferred:
            return Deferred(partial(self._settle, selection, residual, bits or 0, exactly, exact, plan))
        # the one wait: the kernels run on, and need nothing that the host learns
        outcome = self._outcome(exact)
        if selection is None:
            selection = self._selected_by(peers.selected(), bits or 0, residual, k)
        if outcome.stopped_at:
            plan.stopwatch.lap("step")
            if outcome.stopped_at == "threshold":
                return self._keep_and_gather(peers.lists(), selection, plan)
            self._stale_regions = outcome.crowded
            if plan.nonfinite:
                selection = replace(selection, nonfinite=selection.nonfinite + 1)
            return self.exchange_or_undo(
                selection, gradient, residual, out, replace(plan, new_boundaries=False)
            )
        return self._applied(selection, outcome, exact, plan)

    def _settle(
        self,
        selection: Selection | None,
        residual: NDArray[np.float32],
        bits: int,
        exactly: bool,
        exact: bool,
        plan: Plan,
    ) -> Reduction | None:
        """How a deferred step went, see `Deferred`; the selection, where it was made before the step was launched."""
        local, peers, k = self.selection, self._peers, plan.k
        outcome = self._outcome(exact)
        self._stopped_apart, self._stale_regions = outcome.stopped_at == "selection", outcome.crowded
        if selection is None:
            told = peers.selected()
            if told.nonfinite or told.nnz > selection_cap(k):
                local.missed()
            else:
                selection = self._selected_by(told, bits, residual, k)
                if exactly and not selection.exact and bits > 1:
                    local.missed()
        if outcome.flagged:
            raise FlaggedRanksError(list(outcome.flagged))
        if outcome.stopped_at:
            return None
        assert selection is not None  # else the step had stopped
        return self._applied(selection, outcome, exact, plan)

    def _outcome(self, exact: bool) -> Any:
        """How far the kernels of a step came; and where what was selected splits, unless they stopped."""
        outcome = self._peers.outcome(exact)
        self._last_cuts = None
        if not outcome.stopped_at:
            told = self._peers.selected()
            equal = equal_boundaries(self.length, self.transport.size)[1:-1]
            self._last_cuts = np.array(told.cuts, np.int64) if told.nnz else equal
        return outcome

    def _applied(self, selection: Selection, outcome: Any, exact: bool, plan: Plan) -> Reduction:
        """What a step gave that the kernels ended by themselves; learns from it."""
        if exact:
            self.threshold.named(outcome.bits)
        else:
            self.threshold.follow(outcome.bits, outcome.missed)
        finish = partial(self._peers.finish, plan.stopwatch)
        return self._reduction(selection, SparseVector(outcome.gathered, self.length), finish)

    def _selected_by(self, told: Any, bits: int, residual: NDArray[np.float32], k: int) -> Selection:
        """What the kernels of a step selected by the threshold `bits`, cut down where that was too much; learns from it."""
        local = self.selection
        if not told.candidates:
            return local.settle(Packing(told.nnz, told.nonfinite, told.points), residual, k, bits, False)
        local.named(told.candidates, k, bits, told.bits)
        packed = SparseVector(local.buffer(k)[: told.nnz], self.length)
        return Selection(packed, 0, True, bits_magnitude(told.bits), told.points)

    def _select_exactly(
        self, gradient: NDArray[np.float32], residual: NDArray[np.float32], k: int
    ) -> tuple[Selection, NDArray[np.int64]]:
        """The exact local selection among peers, and the cuts that split it evenly."""
        local, lowest = self.selection, self.selection.lower_threshold()
        found = self._peers.select_exact(gradient, residual, lowest)
        if found.short:
            packing = Packing(found.candidates, found.nonfinite)
            selection = local.settle(packing, residual, k, lowest, True)
            return selection, self._cuts(selection.packed)
        local.named(found.candidates, k, lowest, found.bits)
        packed = SparseVector(local.buffer(k)[: found.nnz], self.length)
        return Selection(packed, 0, True, bits_magnitude(found.bits)), np.array(found.cuts, np.int64)

    def _select_by(
        self, bits: int, gradient: NDArray[np.float32], residual: NDArray[np.float32], k: int
    ) -> tuple[Selection, NDArray[np.int64]]:
        """A selection among peers by the threshold there is, and the cuts that split it evenly."""
        nnz, nonfinite, cuts = self._peers.select(gradient, residual, bits)
        selection = self.selection.settle(Packing(nnz, nonfinite), residual, k, bits, False)
        if not nnz or selection.packed.nnz != nnz:
            return selection, self._cuts(selection.packed)
        return selection, np.array(cuts, np.int64)

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
        return self._keep_and_gather(lists, selection, plan)

    def _keep_and_gather(self, lists: RegionLists, selection: Selection, plan: Plan) -> Reduction:
        """Sum the region, keep what reaches the global threshold, and gather it everywhere."""
        kept, counts = self.threshold.keep(lists, plan.k, plan.exact, plan.stopwatch.lap)
        plan.stopwatch.lap("reduce")
        trigger = self.settings.balance_trigger
        update = balance_and_allgatherv(kept, counts, self.length, self.transport, trigger)
        plan.stopwatch.lap("allgather")
        return self._reduction(selection, update)

    def _reduction(
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
            self._peers.close()

    def regions(self, plan: Plan) -> NDArray[np.int64] | None:
        return None if plan.new_boundaries else self.boundaries

    def _new_boundaries(self, packed: SparseVector) -> NDArray[np.int64]:
        if not self.settings.balanced_regions:
            return equal_boundaries(self.length, self.transport.size)
        return region_boundaries(self._cuts(packed), self.length, self.transport)

    def _cuts(self, packed: SparseVector) -> NDArray[np.int64]:
        """int64[P - 1], where this rank's selection splits into equal counts."""
        return self.transport.kernels.equal_count_cuts(packed.entries, self.length, self.transport.size)

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> Any:
        boundaries = state["boundaries"]
        agreed = state["threshold"], None if boundaries is None else [int(cut) for cut in boundaries]
        return *agreed, state.get("last_cuts") is None

    def state_dict(self) -> dict[str, Any]:
        kept = self.boundaries is not None and not self._stale_regions
        boundaries = self.boundaries.copy() if kept else None  # type: ignore[union-attr]
        return super().state_dict() | {
            "threshold": self.threshold.state_dict(),
            "boundaries": boundaries,
            "last_cuts": None if self._last_cuts is None else self._last_cuts.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.threshold.load_state_dict(state["threshold"])
        boundaries = state["boundaries"]
        # boundaries of another number of ranks are agreed on anew
        fits = boundaries is not None and len(boundaries) == self.transport.size + 1
        self.boundaries = np.array(boundaries, np.int64) if fits else None
        cuts = state.get("last_cuts")  # of an earlier version there are none
        known = cuts is not None and len(cuts) == self.transport.size - 1
        self._last_cuts = np.array(cuts, np.int64) if known else None
