"""A step below optimizer and hook: gradients in one vector or in buckets, and tables beside them, are applied together or not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from collectives.closing import announce
from collectives.errors import refuse
from collectives.sparse import Array
from oktopk.allreduce import GradientAllreduce
from oktopk.backend import Ready
from oktopk.buckets import TOGETHER, BucketedAllreduce
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.results import StepReport
from oktopk.torch.interop import TensorMemory
from oktopk.torch.states import as_arrays
from oktopk.torch.step_agreement import StepAgreement
from oktopk.torch.tables import SparseTables

_Result = TypeVar("_Result")


class OneVector:
    """A `GradientAllreduce` as the one bucket of a step, which `finish` takes as a whole.

    Methods as of `BucketedAllreduce`, but that `start` only keeps what the step takes.

    Args:
        reducer: of the vector.
        memory: of its gradient.

    Attributes:
        reducers: the reducer.
        measure: whether the next step takes the paper's measures.
    """

    started = 0  # nothing is on its way between `start` and `finish`

    def __init__(self, reducer: GradientAllreduce, memory: TensorMemory) -> None:
        self.reducers, self._memory = [reducer], memory
        self.can_read_tensors = reducer.can_read_tensors
        self.measure = False
        self._step: Callable[..., StepReport] | None = None

    def reads_tensors(self, number: int) -> bool:
        return self.reducers[0].reads_tensors(self.measure)

    def start(self, gradient: Array | GradientTensors, ready: Ready = None, **beside: Any) -> None:
        """Keep what the step is taken with."""
        self._step = partial(self.reducers[0].step, gradient, **beside)

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Call it now, on the stream of the reducer."""
        done: Future[_Result] = Future()
        with self._memory.stream_scope():
            done.set_result(call())
        return done

    def finish(self, all_or_none: bool = True) -> StepReport:
        """Take the step. Collective."""
        step, self._step = self._step, None
        assert step is not None
        with self._memory.stream_scope():
            return step(measure=self.measure)

    def discard(self) -> StepReport:
        """Skip the step on all ranks. Collective."""
        skipped = self.reducers[0].skip_together(True)
        assert skipped is not None
        return skipped

    def abandon(self) -> None:
        """Forget what the step would have been taken with."""
        self._step = None


class Engine:
    """Ends steps of a reducer and of the tables beside it, both or neither.

    Args:
        reducer: of one vector, or of buckets.
        tables: perhaps none.
        memory: of both.

    Attributes:
        reducer, tables: as given.
        bucketed: the reducer, which the caller starts; of one vector as `OneVector`.
        before_torch, ready: as `TensorMemory.before_torch` and `after_current`. Of one vector they do nothing, as its reducer
            orders its own stream.
    """

    def __init__(
        self, reducer: GradientAllreduce | BucketedAllreduce, tables: SparseTables, memory: TensorMemory
    ) -> None:
        self.reducer, self.tables = reducer, tables
        self.bucketed: BucketedAllreduce | OneVector
        self.before_torch: Callable[[], AbstractContextManager[None]]
        self.ready: Callable[[], Ready]
        if isinstance(reducer, BucketedAllreduce):
            self.bucketed, self.before_torch, self.ready = reducer, memory.before_torch, memory.after_current
        else:
            self.bucketed, self.before_torch, self.ready = OneVector(reducer, memory), nullcontext, _nothing

    def finish(self, problem: str = "", all_or_none: bool = True) -> StepReport:
        """Reduce the tables, which can be undone without traffic, then end the step of the rest. Collective.

        Buckets were started before: ranks may have started unlike numbers of them in the backward pass, and one that waits for a
        bucket of another rank, on the host or on the stream, must not be waited for itself.

        Args:
            problem: of this rank, where there are tables: every rank raises it.
            all_or_none: where a table or a bucket is skipped, skip all; else it alone is zero.

        Raises:
            NonFiniteGradientError, ValueError, RuntimeError: as `GradientAllreduce.step`; nothing is applied then.
        """
        try:
            reduced = not self.tables or self._reduce_tables(problem, all_or_none)
        except TOGETHER:
            if self.bucketed.started:
                with suppress(*TOGETHER):  # the tables' error names the ranks
                    self._discard()
            raise
        if not reduced:
            return self._discard()
        try:
            with self.before_torch():
                report = self.bucketed.finish(all_or_none)
        except BaseException:
            self.tables.take_back()
            raise
        if report.skipped and all_or_none:
            self.tables.take_back()
        report.row_bytes = sum(each.bytes for each in self.tables.reports)
        return report

    def _reduce_tables(self, problem: str, all_or_none: bool) -> bool:
        """As `SparseTables.reduce`, in the thread of the first bucket, whose stream it is on. Collective."""
        ready = self.ready()
        with self.before_torch():
            return self.bucketed.submit(partial(self.tables.reduce, problem, ready, all_or_none)).result()

    def _discard(self) -> StepReport:
        """End a step whose tables were not reduced. Collective."""
        with self.before_torch():
            return self.bucketed.discard()

    def hear(
        self, agreement: StepAgreement, report: StepReport, token: int | None = None, problem: str = ""
    ) -> bytes:
        """As `StepAgreement.hear`, of a step that has ended; it is undone where ranks differ in the groups' numbers.

        Args:
            token: of this rank, told where the bucket that was to take it along was skipped; None: nothing is heard then.
            problem: for which the step is undone, too; all ranks have it alike.

        Raises:
            ValueError: they differ, or there is a problem; on every rank alike.

        Traffic: a control allgather of the tokens, where they are told.
        """
        tokens, transport = self.reducer.tokens, self.reducer.transport
        if tokens is None and token is not None and report.skipped and report.complete:
            tokens = tuple(transport.allgather_control(np.array([token], np.int64))[:, 0].tolist())
        try:
            refuse(problem)
            return agreement.hear(tokens, transport, not report.complete)
        except ValueError:
            self.reducer.take_back()
            self.tables.take_back()
            raise

    def load(self, reducer: dict[str, Any] | None, tables: dict[str, Any] | None) -> None:
        """Continue from the states of the reducer and of the tables; None: as before the first step. Collective.

        Raises:
            ValueError: as `GradientAllreduce.load_state_dict`; on every rank alike.
        """
        if reducer is None:
            self.reducer.reset()
        else:
            self.reducer.load_state_dict(as_arrays(reducer))
        self.tables.load(tables)

    def renumber(self, steps: int) -> None:
        """Go on as after so many steps, which left no residual; equal on all ranks."""
        self.reducer.renumber(steps, 0)
        for table in self.tables.reducers:
            table.steps = steps

    def close(self) -> None:
        """Free what the library holds. Collective."""
        announce([*self.reducer.transports, *self.tables.transports])
        self.tables.close()
        self.reducer.close()


def _nothing() -> None:
    """There is no mark to wait for: a reducer of one vector is on torch's current stream."""
