"""Ok-Topk's steps through peer memory: what the host asks of the kernels, and what it does with how far they came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude
from collectives.sparse import SparseVector
from collectives.tokens import TokenBoard
from collectives.transport import FlaggedRanksError
from oktopk.cpu.kernels import Packing
from oktopk.displacement import is_flagged
from oktopk.error_feedback import ErrorFeedback
from oktopk.methods.oktopk import OkTopk
from oktopk.regions import equal_boundaries
from oktopk.selection import Selection
from oktopk.settings import selection_cap
from oktopk.step import Plan, StepResult
from oktopk.thresholds import keeps_enough


@dataclass(slots=True)
class _P2PHandle:
    """A step that is on the stream, see `oktopk.step.StepHandle`.

    Attributes:
        executor: that began it; epoch: of its launch.
        gradient: the caller's; flagged: it counts as not finite.
        plan: of the step.
        selection: made before the launch; None where the step's own kernels select.
        bits: the local threshold that they select by.
        cut_to_k: they cut what they select down to the top k.
        exact: the exact global threshold is computed.
        deferred: the host does not help.
    """

    executor: P2PExecutor
    epoch: int
    gradient: Any
    flagged: bool
    plan: Plan
    selection: Selection | None
    bits: int
    cut_to_k: bool
    exact: bool
    deferred: bool

    def abort(self) -> None:
        self.executor.p2p_step.abort(self.epoch)

    def result(self) -> StepResult:
        result = self.executor.end_deferred(self) if self.deferred else self.executor.end_waited(self)
        result.tokens = self.executor.tokens.read()
        return result


class P2PExecutor:
    """Runs the steps of one instance of Ok-Topk whose ranks read each other's memory.

    Where the kernels of a step stop, all ranks stop at the same place. A step that is waited for is launched again from a
    selection that the host has made right, lets the kernels compute the exact threshold, or goes on by messages. A deferred step
    is given up.

    Args:
        method: its thresholds and regions serve steps through peer memory and over messages alike.
        vectors: of this rank.
        p2p_step: an `oktopk.cuda.p2p_step.P2PStep`.

    Attributes:
        tokens: of its steps.
    """

    def __init__(self, method: OkTopk, vectors: ErrorFeedback, p2p_step: Any) -> None:
        self._method, self._vectors = method, vectors
        self.p2p_step = p2p_step
        self.tokens = TokenBoard(method.transport)
        # a deferred step stopped at its selection: kernels of some rank may have yet to read what was selected
        self._barrier_due = False

    def begin(self, gradient: Any, plan: Plan) -> _P2PHandle:
        epoch = self.p2p_step.upcoming_epoch()
        try:
            return self._begin(gradient, plan, epoch)
        except BaseException:
            self.p2p_step.abort(epoch)
            raise

    def _begin(self, gradient: Any, plan: Plan, epoch: int) -> _P2PHandle:
        method, vectors = self._method, self._vectors
        regions, local, threshold = method.regions, method.selection, method.threshold
        if not self.p2p_step.fits(plan.k):
            self.p2p_step.prepare(plan.k)
        if plan.problem:
            raise ValueError(plan.problem)
        self.tokens.post(plan.token)
        flagged = is_flagged(gradient)
        if self._barrier_due:
            # a signal of this step would overwrite the one that another rank's kernels have yet to read
            method.transport.barrier()
            self._barrier_due = False
        # equal on all ranks, as all that they depend on is
        renew = regions.due(plan.new_boundaries)
        exact = plan.exact or threshold.bits is None
        deferred = plan.may_defer and threshold.bits is not None and not (renew and regions.splits is None)
        selection, splits = None, regions.splits
        if deferred:
            # a guess that missed once need not come near the next time: this rank alone waits
            first = local.needs_host and (renew or exact or local.needs_exact or local.bits is None)
        else:
            first = renew or flagged or local.needs_exact or local.bits is None
            # kernels cut to k what a guess selects
            first = first or (plan.exact and local.lower_threshold() <= 1)
        if first:
            with plan.timer.stage("select"):
                selection, splits = self._select_first(gradient, flagged, plan)
        if renew:
            # a deferred step proposes the splits of the selection before: regions are for many steps
            proposed = regions.splits if deferred else splits
            assert proposed is not None
            with plan.timer.stage("boundaries"):
                regions.renew(proposed)
        cut_to_k = selection is None and (plan.exact or local.needs_exact)
        bits = 0
        if selection is None:
            bits = local.lower_threshold() if cut_to_k else local.bits or 0
        step = _P2PHandle(self, epoch, gradient, flagged, plan, selection, bits, cut_to_k, exact, deferred)
        with plan.timer.stage("step", ends=deferred):
            self._launch(step)
        if deferred:
            vectors.nothing_applied()  # as far as the host knows
            vectors.selected, vectors.pending = None, True
        return step

    def _launch(self, step: _P2PHandle) -> None:
        """Put the step's kernels on the stream, see `P2PStep.launch`."""
        threshold, boundaries = self._method.threshold, self._method.regions.boundaries
        assert boundaries is not None
        selection = step.selection
        self.p2p_step.launch(
            step.gradient,
            self._vectors,
            (step.bits, threshold.lowest if step.exact else threshold.expected),
            boundaries,
            selected=selection and (selection.packed.nnz, selection.nonfinite + step.flagged),
            exact=step.exact,
            timed=step.plan.timer.detailed,
            cut_to_k=step.cut_to_k,
            deferred=step.deferred,
        )

    def end_waited(self, step: _P2PHandle) -> StepResult:
        """The result of a step that the host waits for."""
        method, vectors, plan, k = self._method, self._vectors, step.plan, step.plan.k
        # while kernels run: the selection is known long before the outcome
        selection, splits = step.selection or self._selected_by(step), self._splits()
        with plan.timer.stage("step", ends=False):
            # the one wait: the kernels run on, and need nothing that the host learns
            outcome = self.p2p_step.outcome(step.exact)
            # a deferred step of more than 2k would have been given up; a guess that is too short looks the same here
            deferrable = outcome.stopped_at != "selection"
            if not (deferrable or outcome.flagged or outcome.overflowed):
                outcome = self._launch_again(step, selection)
                splits = self._splits()
        if outcome.stopped_at == "threshold" and not (step.exact or outcome.skewed):
            # a deferred step would have gone on with what the best candidate keeps
            deferrable = deferrable and keeps_enough(outcome.nearest, k)
            step.exact = True
            outcome = self.p2p_step.go_exact(method.threshold.lowest)
        method.regions.splits = None if outcome.stopped_at else splits
        if not outcome.stopped_at:
            result = self._applied(step, selection, outcome)
            result.deferrable = deferrable
            plan.timer.record("step")
            return result
        plan.timer.record("step")
        all_added = not selection.nonfinite
        try:
            if outcome.stopped_at == "sums":
                raise FlaggedRanksError([])
            if outcome.stopped_at == "threshold":
                exact = replace(plan, exact=step.exact)
                result = method.keep_and_gather(self.p2p_step.lists(), selection, exact)
            else:
                method.regions.overflowed = outcome.overflowed
                if step.flagged:
                    selection = replace(selection, nonfinite=selection.nonfinite + 1)
                result = method.exchange(selection, vectors.update, replace(plan, new_boundaries=False))
        except FlaggedRanksError:
            method.kernels.undo_accumulate(step.gradient, vectors.residual, all_added)
            vectors.drop_update()
            raise
        with plan.timer.stage("apply"):
            vectors.apply(result, plan.scale)
        return result

    def _launch_again(self, step: _P2PHandle, selection: Selection) -> Any:
        """The outcome of a step whose selection was too long or too short on some rank, and is right now. Collective."""
        epoch = self.p2p_step.upcoming_epoch()
        try:
            # another rank's kernels may have yet to read what was selected at first
            self._method.transport.barrier()
            self._launch(replace(step, selection=selection, bits=0, cut_to_k=False))
            return self.p2p_step.outcome(step.exact)
        except BaseException:
            self.p2p_step.abort(epoch)
            raise

    def end_deferred(self, step: _P2PHandle) -> StepResult:
        """The result of a deferred step; not collective."""
        method, local, k = self._method, self._method.selection, step.plan.k
        selection = step.selection
        if selection is None:
            selected = self.p2p_step.selected()
            if selected.nonfinite or selected.nnz > selection_cap(k):
                local.force_exact()
            else:
                selection = self._selected_by(step)
                if step.cut_to_k and not selection.exact and step.bits > 1:
                    local.force_exact()
        splits = self._splits()
        outcome = self.p2p_step.outcome(step.exact)
        self._barrier_due, method.regions.overflowed = outcome.stopped_at == "selection", outcome.overflowed
        method.regions.splits = None if outcome.stopped_at else splits
        if outcome.flagged or outcome.stopped_at == "sums":
            raise FlaggedRanksError(list(outcome.flagged))
        if outcome.stopped_at:
            nothing = SparseVector.empty(method.length)
            return StepResult(nothing, None, given_up=True)
        assert selection is not None  # else the step had stopped
        return self._applied(step, selection, outcome)

    def check(self) -> None:
        self.p2p_step.check_abort()

    def close(self) -> None:
        self.p2p_step.close()
        self._method.close()

    def _splits(self) -> NDArray[np.int64]:
        """int64[P - 1], the indices that split the step's selection into equal counts."""
        selected, method = self.p2p_step.selected(), self._method
        if selected.nnz:
            return np.array(selected.splits, np.int64)
        return equal_boundaries(method.length, method.transport.size)[1:-1]

    def _applied(self, step: _P2PHandle, selection: Selection, outcome: Any) -> StepResult:
        """What a step gave that the kernels ended by themselves; learns from it."""
        if step.exact:
            self._method.threshold.learn_exact(outcome.bits)
        else:
            self._method.threshold.follow(outcome.bits, outcome.missed)
        update = SparseVector(outcome.gathered, self._method.length)
        result = self._method.result(selection, update, deferrable=True)
        self._vectors.applied(result)
        self.p2p_step.time_stages(step.plan.timer)
        return result

    def _selected_by(self, step: _P2PHandle) -> Selection:
        """What the step's kernels selected."""
        return self._selection_of(self.p2p_step.selected(), step.plan.k, step.bits)

    def _selection_of(self, selected: Any, k: int, bits: int) -> Selection:
        """What kernels selected by a threshold, cut down where that was too much; learns from it."""
        local = self._method.selection
        if not selected.candidates:
            packing = Packing(selected.nnz, selected.nonfinite, selected.offsets)
            assert self._vectors.residual is not None
            return local.finish(packing, self._vectors.residual, k, bits, selected.short)
        local.learn_exact(selected.candidates, k, bits, selected.bits)
        packed = SparseVector(local.buffer(k)[: selected.nnz], self._method.length)
        return Selection(packed, 0, True, bits_magnitude(selected.bits), selected.offsets)

    def _select_first(self, gradient: Any, flagged: bool, plan: Plan) -> tuple[Selection, NDArray[np.int64]]:
        """A selection that the host looks at before the step is launched, and the indices that split it evenly."""
        method, local, k, residual = self._method, self._method.selection, plan.k, self._vectors.residual
        assert residual is not None
        if flagged:  # nothing will be exchanged
            selection = local.select(gradient, residual, k, exact=False)
            return selection, method.splits(selection.packed)
        exact = plan.exact or local.needs_exact or local.bits is None
        bits = local.lower_threshold() if exact or local.bits is None else local.bits
        selected = self.p2p_step.select(gradient, residual, bits, exact)
        selection = self._selection_of(selected, k, bits)
        if selected.short or not selected.nnz or selection.packed.nnz != selected.nnz:
            return selection, method.splits(selection.packed)
        return selection, np.array(selected.splits, np.int64)
