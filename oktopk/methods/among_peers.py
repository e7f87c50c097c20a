"""Ok-Topk's steps through peer memory: what the host asks of the kernels, and what it makes of how far they came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude
from collectives.sparse import SparseVector
from collectives.transport import FlaggedRanksError
from oktopk.cpu.kernels import Packing
from oktopk.methods.base import Deferred, Plan, Reduction
from oktopk.regions import equal_boundaries, region_boundaries
from oktopk.selection import Selection
from oktopk.settings import selection_cap

if TYPE_CHECKING:
    from oktopk.methods.oktopk import OkTopk


@dataclass(slots=True)
class _Launched:
    """A step that is on the stream.

    Attributes:
        plan: of the step.
        residual: float32[n].
        selection: made before; None where the step's own kernels select.
        bits: the local threshold that they select by.
        exactly: they cut what they find down to the top k.
        exact: the global threshold is named exactly.
    """

    plan: Plan
    residual: NDArray[np.float32]
    selection: Selection | None
    bits: int
    exactly: bool
    exact: bool


class P2PExecutor:
    """The steps of one instance of Ok-Topk whose ranks read each other's memory.

    Args:
        method: whose thresholds and regions they share with steps by messages, which take over where kernels stopped.
        kernels: an `oktopk.cuda.p2p_executor.P2PStep`.

    Attributes:
        kernels: as given.
        stale_regions: a region got more than there is room for: the next step renews them.
        last_cuts: int64[P - 1], where the last selection splits evenly; known on all ranks or on none.
    """

    def __init__(self, method: OkTopk, kernels: Any) -> None:
        self.kernels = kernels
        self.stale_regions = False
        self.last_cuts: NDArray[np.int64] | None = None
        self._method = method
        # a deferred step stopped at its selection: the kernels of some rank may have yet to read what was selected
        self._stopped_apart = False

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32],
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        """As `Method.reduce`; what is out of the ordinary goes on by messages, or is given up where deferred."""
        method, local, threshold = self._method, self._method.selection, self._method.threshold
        if not self.kernels.fits(plan.k):
            self.kernels.prepare(plan.k)
        if self._stopped_apart:
            # a note of this step would overwrite the one that another rank's kernels have yet to read
            method.transport.barrier()
            self._stopped_apart = False
        # equal on all ranks, as all of it is
        fresh = plan.new_boundaries or self.stale_regions or method.boundaries is None
        exact = plan.exact or threshold.bits is None
        deferred = plan.deferrable and threshold.bits is not None and not (fresh and self.last_cuts is None)
        selection, cuts = None, self.last_cuts
        # a guess that went needs_host once need not come near the next time: this rank alone waits
        if not deferred or local.needs_host:
            selection, cuts = self._select_before(gradient, residual, plan, needed=fresh or exact)
        if selection is not None:
            plan.timer.record("select")
        if fresh:
            # those of a deferred step are of the selection before: regions are for many steps
            proposed = self.last_cuts if deferred else cuts
            assert proposed is not None
            method.boundaries = region_boundaries(proposed, method.length, method.transport)
            self.stale_regions = False
            plan.timer.record("boundaries")
        exactly = selection is None and (plan.exact or local.needs_exact)
        bits = 0
        if selection is None:
            bits = local.lower_threshold() if exactly else local.bits or 0
        step = _Launched(plan, residual, selection, bits, exactly, exact)
        self._launch(step, gradient, out, deferred)
        if deferred:
            return Deferred(partial(self._settle, step))
        # the one wait: the kernels run on, and need nothing that the host learns
        outcome = self._outcome(exact)
        selection = selection or self._selected_by(step)
        aided = False
        if outcome.stopped_at == "threshold" and not (exact or outcome.skewed):
            # a deferred step would have gone on with what the best rung keeps
            aided = not plan.k / 2 <= outcome.nearest <= selection_cap(plan.k)
            step.exact = True
            outcome = self._learn_cuts(self.kernels.name_exactly(threshold.lowest))
        if not outcome.stopped_at:
            return replace(self._applied(step, selection, outcome), aided=aided)
        plan.timer.record("step")
        if outcome.stopped_at == "threshold":
            return method.keep_and_gather(self.kernels.lists(), selection, replace(plan, exact=step.exact))
        self.stale_regions = outcome.crowded
        if plan.nonfinite:
            selection = replace(selection, nonfinite=selection.nonfinite + 1)
        plan = replace(plan, new_boundaries=False)
        return method.exchange_or_undo(selection, gradient, residual, out, plan)

    def _launch(
        self, step: _Launched, gradient: NDArray[np.float32], out: NDArray[np.float32], deferred: bool
    ) -> None:
        plan, selection, threshold = step.plan, step.selection, self._method.threshold
        given = None
        if selection is not None:
            given = selection.packed.nnz, selection.nonfinite + plan.nonfinite
        assert self._method.boundaries is not None
        self.kernels.launch(
            gradient,
            step.residual,
            out,
            plan.velocity,
            (step.bits, threshold.lowest if step.exact else threshold.expected),
            self._method.boundaries,
            plan.support,
            plan.clear_out,
            selected=given,
            exact=step.exact,
            timed=plan.timer.detailed,
            exactly=step.exactly,
            unaided=deferred,
        )

    def _settle(self, step: _Launched) -> Reduction | None:
        """How a deferred step went, see `Deferred`."""
        local, k = self._method.selection, step.plan.k
        outcome, selection = self._outcome(step.exact), step.selection
        self._stopped_apart, self.stale_regions = outcome.stopped_at == "selection", outcome.crowded
        if selection is None:
            told = self.kernels.selected()
            if told.nonfinite or told.nnz > selection_cap(k):
                local.missed()
            else:
                selection = self._selected_by(step)
                if step.exactly and not selection.exact and step.bits > 1:
                    local.missed()
        if outcome.flagged:
            raise FlaggedRanksError(list(outcome.flagged))
        if outcome.stopped_at:
            return None
        assert selection is not None  # else the step had stopped
        return self._applied(step, selection, outcome)

    def _outcome(self, exact: bool) -> Any:
        return self._learn_cuts(self.kernels.outcome(exact))

    def _learn_cuts(self, outcome: Any) -> Any:
        """The outcome, once it is known where what was selected splits, unless the kernels stopped."""
        self.last_cuts = None
        if not outcome.stopped_at:
            told, method = self.kernels.selected(), self._method
            equal = equal_boundaries(method.length, method.transport.size)[1:-1]
            self.last_cuts = np.array(told.cuts, np.int64) if told.nnz else equal
        return outcome

    def _applied(self, step: _Launched, selection: Selection, outcome: Any) -> Reduction:
        """What a step gave that the kernels ended by themselves; learns from it."""
        if step.exact:
            self._method.threshold.named(outcome.bits)
        else:
            self._method.threshold.follow(outcome.bits, outcome.missed)
        finish = partial(self.kernels.finish, step.plan.timer)
        return self._method.reduction(selection, SparseVector(outcome.gathered, self._method.length), finish)

    def _selected_by(self, step: _Launched) -> Selection:
        """What the step's kernels selected, cut down where that was too much; learns from it."""
        local, k, told = self._method.selection, step.plan.k, self.kernels.selected()
        if not told.candidates:
            packing = Packing(told.nnz, told.nonfinite, told.points)
            return local.settle(packing, step.residual, k, step.bits, False)
        local.named(told.candidates, k, step.bits, told.bits)
        packed = SparseVector(local.buffer(k)[: told.nnz], self._method.length)
        return Selection(packed, 0, True, bits_magnitude(told.bits), told.points)

    def _select_before(
        self, gradient: NDArray[np.float32], residual: NDArray[np.float32], plan: Plan, needed: bool
    ) -> tuple[Selection | None, NDArray[np.int64] | None]:
        """A selection that the host looks at before the step is launched, and the cuts that split it evenly.

        Args:
            needed: also where the threshold there is will do; else (None, None) then.
        """
        method, local, k = self._method, self._method.selection, plan.k
        if plan.nonfinite:
            # nothing will be exchanged, and what is given in the velocity's place may be narrower
            selection = local.select(gradient, residual, k, exact=False)
            return selection, method.cuts(selection.packed)
        if plan.exact or local.needs_exact or local.bits is None:
            return self._select_exactly(gradient, residual, k)
        return self._select_by(local.bits, gradient, residual, k) if needed else (None, None)

    def _select_exactly(
        self, gradient: NDArray[np.float32], residual: NDArray[np.float32], k: int
    ) -> tuple[Selection, NDArray[np.int64]]:
        method, local, lowest = self._method, self._method.selection, self._method.selection.lower_threshold()
        found = self.kernels.select_exact(gradient, residual, lowest)
        if found.short:
            packing = Packing(found.candidates, found.nonfinite)
            selection = local.settle(packing, residual, k, lowest, True)
            return selection, method.cuts(selection.packed)
        local.named(found.candidates, k, lowest, found.bits)
        packed = SparseVector(local.buffer(k)[: found.nnz], method.length)
        return Selection(packed, 0, True, bits_magnitude(found.bits)), np.array(found.cuts, np.int64)

    def _select_by(
        self, bits: int, gradient: NDArray[np.float32], residual: NDArray[np.float32], k: int
    ) -> tuple[Selection, NDArray[np.int64]]:
        nnz, nonfinite, cuts = self.kernels.select(gradient, residual, bits)
        selection = self._method.selection.settle(Packing(nnz, nonfinite), residual, k, bits, False)
        if not nnz or selection.packed.nnz != nnz:
            return selection, self._method.cuts(selection.packed)
        return selection, np.array(cuts, np.int64)
