"""Ok-Topk's steps through peer memory: each is one launch, and ends by what the ranks decided.

A launch does all of a step, also of one that renews regions, unless its kernels stop. All ranks stop at the same place then, and
`p2p_outcome` tells what follows. A step that is waited for goes on from a selection that the host has made right, in a second
launch as the first step of all, with the exact threshold, or by messages. A deferred step is given up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.layouts import (
    ABORTED,
    BAD_REGIONS,
    CUT_TO_K,
    DEFERRED,
    FLAGGED,
    NUM_COUNTERS,
    PROCEED,
)
from collectives.errors import FlaggedRanksError
from collectives.sparse import ENTRY, SparseVector
from collectives.tokens import TokenBoard
from collectives.traffic import WORD_BYTES
from oktopk.cpu.histograms import LEVELS
from oktopk.cpu.kernels import Packing
from oktopk.cuda.p2p_outcome import (
    STOPPED_BEFORE_SUMS,
    Action,
    Outcome,
    could_be_deferred,
    next_action,
    packing_of,
)
from oktopk.displacement import is_flagged
from oktopk.error_feedback import ErrorFeedback
from oktopk.methods.oktopk import OkTopk
from oktopk.selection import Selection
from oktopk.settings import selection_cap
from oktopk.step import Gradient, Plan, StepResult
from oktopk.thresholds import CANDIDATES

if TYPE_CHECKING:
    from oktopk.cuda.p2p_launches import P2PLaunches

_CANDIDATE_BITS = CANDIDATES.tolist()
_DIGITS = sum(1 << width for _, width in LEVELS)
_ABORTED = "steps through peer memory cannot go on: {}. Continue from a checkpoint"


class P2PExecutor:
    """Runs the steps of one instance of Ok-Topk whose ranks read each other's memory.

    `begin` makes a step, which has `P2PLaunches` launch it. `Steps` then asks the step for its `result`, which waits for the
    selection and the `outcome`, and has the executor note what was `applied`.

    Args:
        method: its thresholds and regions serve steps through peer memory and over messages alike.
        vectors: of this rank.
        make_launches: k -> an `oktopk.cuda.p2p_launches.P2PLaunches`. Collective.

    Attributes:
        method, vectors: as given.
        launches: for the k of the last step, once there was one.
        tokens: of its steps.
    """

    def __init__(
        self, method: OkTopk, vectors: ErrorFeedback, make_launches: Callable[[int], P2PLaunches]
    ) -> None:
        self.method, self.vectors, self._make_launches = method, vectors, make_launches
        self._launches: P2PLaunches | None = None
        self.tokens = TokenBoard(method.transport)
        self._aborted = ""  # why no step can follow

    @property
    def launches(self) -> P2PLaunches:
        """Those of the last k, once a step has begun."""
        assert self._launches is not None
        return self._launches

    def begin(self, gradient: Gradient, plan: Plan) -> _P2PStep:
        method, local, threshold = self.method, self.method.selection, self.method.threshold
        with self.launching():
            self._lay_out_for(plan.k)
            boundaries = method.regions_of_step(plan)
            if plan.problem:
                raise ValueError(plan.problem)
            self.tokens.post(plan.token)
            # exact and deferred are equal on all ranks, as all that they depend on is
            exact = plan.exact or threshold.bits is None
            deferred = plan.may_defer and threshold.bits is not None
            bits = None if plan.exact or local.needs_exact else local.bits
            cut_to_k = bits is None
            if bits is None:
                bits = local.lower_threshold()
            flags = CUT_TO_K * cut_to_k + DEFERRED * deferred + FLAGGED * is_flagged(gradient)
            step = (_Deferred if deferred else _Waited)(
                self, plan, gradient, boundaries, bits, flags, exact, deferred
            )
            with plan.timer.stage("step", ends=deferred):
                step.launch()
        if deferred:
            self.vectors.nothing_applied()  # as far as the host knows
            self.vectors.selected, self.vectors.pending = None, True
        return step

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Abort the steps of all ranks where this one raises before its kernels are on the stream: theirs would wait for them."""
        if self._aborted:
            raise RuntimeError(self._aborted)
        epoch = self.method.transport.device.epoch + 1  # type: ignore[attr-defined]
        try:
            yield
        except BaseException:
            self.abort(epoch)
            raise

    def outcome(self, epoch: int, exact: bool, packing: Packing | None = None) -> Outcome:
        """What the ranks decided of a launch, and its traffic counted; waits for that alone.

        Args:
            exact: the launch computes the exact global threshold.
            packing: what this rank selected in it; None where it did not begin with selections.

        Raises:
            RuntimeError: a rank raised an error of its own, or did not come within `Settings.timeout`; on every rank, at the
                latest in its next step.
        """
        transport = self.method.transport
        rank, others, traffic = transport.rank, transport.size - 1, transport.traffic
        # while kernels run: what follows the wait keeps the GPU from its next step
        sent = 0, 0
        if packing is not None:
            at = packing.offsets
            assert at is not None
            messages = sum(other != rank and at[other] < at[other + 1] for other in range(others + 1))
            sent = ENTRY.itemsize * (packing.nnz - at[rank + 1] + at[rank]), messages
            traffic.count_control(WORD_BYTES * others * (others + 4))
        outcome = Outcome.read(self.launches.decided.read(epoch))
        if outcome.stop == ABORTED:
            self._aborted = _ABORTED.format(self.launches.why_aborted(outcome.counts))
            raise RuntimeError(self._aborted)
        if outcome.stop not in STOPPED_BEFORE_SUMS:
            traffic.count(*sent)
            words, messages = (_DIGITS, len(LEVELS)) if exact else (NUM_COUNTERS, 1)
            traffic.count_control(WORD_BYTES * others * words, messages)
        if outcome.stop == PROCEED:
            kept = outcome.counts[rank]
            traffic.count_control(0, 1)
            traffic.count(ENTRY.itemsize * others * kept, others if kept else 0)
        return outcome

    def applied(self, step: _P2PStep, selection: Selection, outcome: Outcome, exact: bool) -> StepResult:
        """What a step gave that the kernels ended; learns from it."""
        method = self.method
        if exact:
            method.threshold.learn_exact(outcome.bits)
        else:
            method.threshold.follow(outcome.bits, _CANDIDATE_BITS[outcome.nearest])
        result = method.result(
            selection, SparseVector(self.launches.gathered[: outcome.total], method.length)
        )
        self.vectors.applied(result)
        self.launches.time_stages(step.plan.timer)
        return result

    def abort(self, epoch: int) -> None:
        """Abort the step on all ranks from this epoch on, as this rank raises: their kernels would wait for its."""
        if self._launches is not None:
            self._aborted = _ABORTED.format(f"rank {self.method.transport.rank} raised an error of its own")
            self._launches.abort(epoch)

    def check(self) -> None:
        """Look for an abort that no step of this rank has met; waits for its kernels."""
        if self._launches is not None and not self._aborted and self._launches.aborted:
            self._aborted = _ABORTED.format("a rank did not finish its step")
        if self._aborted:
            raise RuntimeError(self._aborted)

    def close(self) -> None:
        if self._launches is not None:
            self._launches.close()
        self._launches = None
        self.method.close()

    def _lay_out_for(self, k: int) -> None:
        """Lay everything out for a k. Collective where it is new.

        Raises:
            RuntimeError: a rank has no memory for it, or a step was aborted; on every rank alike.
        """
        if self._launches is not None and self._launches.k == k:
            return
        if self._launches is not None:
            if any(self.method.transport.allgather_objects(self._launches.aborted)):
                raise RuntimeError(_ABORTED.format("a rank did not finish its step"))
            self._launches.close()
            self._launches = None
        self._launches = self._make_launches(k)


@dataclass(slots=True)
class _P2PStep:
    """A step that is on the stream, see `oktopk.step.StepHandle`.

    Attributes:
        executor: that began it.
        plan: of the step.
        gradient: the caller's.
        boundaries: int64[P + 1], its regions.
        bits: the local threshold; flags: of the launch.
        exact: the launch computes the exact global threshold.
        epoch: of the last launch.
    """

    executor: P2PExecutor
    plan: Plan
    gradient: Gradient
    boundaries: NDArray[np.int64]
    bits: int
    flags: int
    exact: bool
    deferred: bool
    epoch: int = 0

    def launch(self, selected: int | None = None) -> None:
        """Put its kernels on the stream, see `P2PLaunches.launch`."""
        threshold = self.executor.method.threshold
        bits = self.bits, threshold.lowest if self.exact else threshold.expected
        self.epoch = self.executor.launches.launch(
            self.gradient, self.executor.vectors, self.boundaries, bits, self.flags,
            exact=self.exact, timed=self.plan.timer.detailed, selected=selected,
        )  # fmt: skip

    def abort(self) -> None:
        self.executor.abort(self.epoch)

    def result(self) -> StepResult:
        result = self._end()
        result.tokens = self.executor.tokens.read()
        return result

    @abstractmethod
    def _end(self) -> StepResult:
        """As `result`, without the tokens."""

    def _packing(self) -> Packing:
        """What the last launch selected; waits for that alone, which comes long before the outcome."""
        executor = self.executor
        return packing_of(executor.launches.selected.read(self.epoch), executor.method.transport.size)

    def _selection(self, packing: Packing) -> Selection:
        """The selection of a launch, made right where the kernels could not; learns from it."""
        residual, cut_to_k = self.executor.vectors.residual, bool(self.flags & CUT_TO_K)
        assert residual is not None
        # the kernels of a deferred step take what they have packed, if it is not all
        exact = cut_to_k and (not self.deferred or self.bits == 1)
        if self.flags & FLAGGED:
            packing.nonfinite -= 1
        return self.executor.method.selection.finish(packing, residual, self.plan.k, self.bits, exact)


class _Waited(_P2PStep):
    """One that the host waits for, and helps."""

    __slots__ = ()

    def _end(self) -> StepResult:
        executor, plan, exact = self.executor, self.plan, self.exact
        # while kernels run: the selection is known long before the outcome
        packing = self._packing()
        selection = self._selection(packing)
        with plan.timer.stage("step", ends=False):
            # the one wait: the kernels run on, and need nothing that the host learns
            first = outcome = executor.outcome(self.epoch, exact, packing)
            action = next_action(outcome, exact=exact, deferred=False)
            if action is Action.LAUNCH_AGAIN:
                with executor.launching():
                    self.launch(selected=selection.packed.nnz)
                outcome = executor.outcome(self.epoch, exact, self._packing())
                action = next_action(outcome, exact=exact, deferred=False)
        if action is Action.GO_EXACT:
            with executor.launching():
                self.epoch = executor.launches.launch_exact(executor.method.threshold.lowest)
            exact, outcome = True, executor.outcome(self.epoch, True)
            action = next_action(outcome, exact=True, deferred=False)
        result = None
        if action is Action.APPLY:
            result = executor.applied(self, selection, outcome, exact)
            result.deferrable = could_be_deferred(first, plan.k)
        plan.timer.record("step")
        return result or self._end_by_messages(action, selection, outcome, exact)

    def _end_by_messages(
        self, action: Action, selection: Selection, outcome: Outcome, exact: bool
    ) -> StepResult:
        """What a step gives that the kernels could not end. Collective."""
        executor, plan = self.executor, self.plan
        method, vectors = executor.method, executor.vectors
        try:
            if action is Action.FLAG:
                raise FlaggedRanksError(outcome.flagged)
            if action is Action.GATHER:
                result = method.keep_and_gather(
                    executor.launches.lists(), selection, replace(plan, exact=exact)
                )
            else:
                result = method.exchange(selection, vectors.update, plan)
                method.regions.stale = True
        except FlaggedRanksError:
            method.kernels.undo_accumulate(self.gradient, vectors.residual, not selection.nonfinite)
            vectors.drop_update()
            raise
        with plan.timer.stage("apply"):
            vectors.apply(result, plan.scale)
        return result


class _Deferred(_P2PStep):
    """One that ends as its kernels end it; ending it is not collective."""

    __slots__ = ()

    def _end(self) -> StepResult:
        executor, method = self.executor, self.executor.method
        regions, local = method.regions, method.selection
        packing, selection = self._packing(), None
        if not (packing.nonfinite or packing.nnz > selection_cap(self.plan.k)):
            selection = self._selection(packing)
        if selection is None or (self.flags & CUT_TO_K and not selection.exact):
            local.force_exact()  # the step stops, or its guess was too high
        outcome = executor.outcome(self.epoch, self.exact, packing)
        action = next_action(outcome, exact=self.exact, deferred=True)
        if action is Action.FLAG:
            raise FlaggedRanksError(outcome.flagged)
        if outcome.stop == BAD_REGIONS:
            regions.stale = True
            regions.learn(packing.splits if packing.nnz else None)
        if action is Action.GIVE_UP or selection is None:
            return StepResult(SparseVector.empty(method.length), None, given_up=True)
        result = executor.applied(self, selection, outcome, self.exact)
        result.deferrable = not outcome.few
        return result
