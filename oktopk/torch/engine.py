"""A step below optimizer and hook: gradients in one vector or in buckets, and tables beside them, are applied together or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.closing import announce
from oktopk.allreduce import GradientAllreduce
from oktopk.buckets import TOGETHER, BucketedAllreduce
from oktopk.results import StepReport
from oktopk.torch.interop import TensorMemory
from oktopk.torch.states import as_arrays
from oktopk.torch.step_agreement import StepAgreement
from oktopk.torch.tables import SparseTables


class Engine:
    """Ends steps of a reducer and of the tables beside it, both or neither.

    Args:
        reducer: of one vector, or of buckets, which the caller starts.
        tables: perhaps none.
        memory: of both.

    Attributes:
        reducer, tables: as given.
    """

    def __init__(
        self, reducer: GradientAllreduce | BucketedAllreduce, tables: SparseTables, memory: TensorMemory
    ) -> None:
        self.reducer, self.tables, self._memory = reducer, tables, memory

    def finish(
        self, step: Callable[[], StepReport] | None = None, problem: str = "", all_or_none: bool = True
    ) -> StepReport:
        """Reduce the tables, which can be undone without traffic, then end the step of the rest. Collective.

        Buckets were started before: ranks may have started unlike numbers of them in the backward pass, and one that waits for a
        bucket of another rank, on the host or on the stream, must not be waited for itself.

        Args:
            step: takes the step of one vector.
            problem: of this rank, where there are tables: every rank raises it.
            all_or_none: where a table or a bucket is skipped, skip all; else it alone is zero.

        Raises:
            NonFiniteGradientError, ValueError, RuntimeError: as `GradientAllreduce.step`; nothing is applied then.
        """
        try:
            reduced = not self.tables or self._reduce_tables(problem, all_or_none)
        except TOGETHER:
            if isinstance(self.reducer, BucketedAllreduce):
                self._discard(self.reducer)
            raise
        if not reduced:
            if isinstance(self.reducer, BucketedAllreduce):
                return self._discard(self.reducer)
            skipped = self.reducer.skip_together(True)
            assert skipped is not None
            return skipped
        try:
            if isinstance(self.reducer, BucketedAllreduce):
                with self._memory.before_torch():
                    report = self.reducer.finish(all_or_none)
            else:
                assert step is not None
                report = step()
        except BaseException:
            self.tables.take_back()
            raise
        if report.skipped and all_or_none:
            self.tables.take_back()
        report.row_bytes = sum(each.bytes for each in self.tables.reports)
        return report

    def _reduce_tables(self, problem: str, all_or_none: bool) -> bool:
        """As `SparseTables.reduce`, in the thread of the first bucket, whose stream it is on. Collective."""
        if not isinstance(self.reducer, BucketedAllreduce):
            with self._memory.stream_scope():
                return self.tables.reduce(problem)
        ready = self._memory.after_current()
        with self._memory.before_torch():
            return self.reducer.submit(partial(self.tables.reduce, problem, ready, all_or_none)).result()

    def _discard(self, reducer: BucketedAllreduce) -> StepReport:
        """End a step whose tables were not reduced. Collective."""
        with self._memory.before_torch():
            return reducer.discard()

    def hear(self, agreement: StepAgreement, report: StepReport) -> bytes:
        """As `StepAgreement.hear`, of a step that has ended; it is undone where ranks differ in the groups' numbers.

        Raises:
            ValueError: they differ; on every rank alike.
        """
        try:
            return agreement.hear(self.reducer.tokens, self.reducer.transport, not report.complete)
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
