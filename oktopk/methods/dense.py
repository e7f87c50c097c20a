"""Dense: every entry, by Rabenseifner's allreduce, or by kernels through peer memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.errors import FlaggedRanksError
from collectives.sparse import Vector
from oktopk.methods.base import Method
from oktopk.settings import Settings
from oktopk.step import Addend, Plan, StepResult


class Dense(Method):
    """The exact sum; nothing stays behind.

    Traffic: `collectives.dense_allreduce.dense_words`; through peer memory `collectives.cuda.dense_algorithms.bytes_sent`.
    Control: over messages one allgather of a flag and one allreduce; through peer memory the allgather, if a sum is not finite.
    """

    name = "dense"
    sparse = False
    _allreduce: Any = None

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        return ""

    def prepare(self, out: Vector) -> None:
        self._allreduce = self.transport.dense_allreduce(out, self.settings.timeout)

    @property
    def sends_control(self) -> bool:
        return not self._allreduce.on_device

    def reduce(
        self,
        gradient: Addend,
        residual: Vector | None,
        out: Vector | None,
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        assert out is not None, "it writes out"
        if self._allreduce.on_device:
            return self._reduce_on_device(gradient, residual, out, plan, overflowed)
        with plan.timer.stage("select"):
            nonfinite = self.kernels.accumulate(gradient, residual, out)
        with plan.timer.stage("allreduce"):
            flags = self.transport.allgather_control(np.array([nonfinite > 0 or overflowed], np.int64))
            if flags.any():
                raise FlaggedRanksError(np.flatnonzero(flags).tolist())
            finite = self._allreduce.run(plan.scale)
            if self.transport.allreduce_control(np.array([not finite], np.int64))[0]:
                raise FlaggedRanksError([])
        return self._result()

    def _reduce_on_device(
        self, gradient: Addend, residual: Vector | None, out: Vector, plan: Plan, overflowed: bool
    ) -> StepResult:
        """The same with one wait: what is not finite on some rank is not finite in the sum, which all ranks see."""
        try:
            with plan.timer.stage("select"):
                self.kernels.start_accumulate(gradient, residual, out)
                if overflowed:
                    out[:1].fill(np.nan)
            with plan.timer.stage("allreduce"):
                finite = self._allreduce.run(plan.scale)
        except BaseException:
            self._allreduce.abort()  # the others' kernels may wait for this rank's
            raise
        if not finite:
            flagged = self.kernels.take_nonfinite() > 0 or overflowed
            flags = self.transport.allgather_control(np.array([flagged], np.int64))
            raise FlaggedRanksError(np.flatnonzero(flags).tolist())
        return self._result()

    def _result(self) -> StepResult:
        return StepResult(None, None, local_exact=True, local_nnz=self.length, global_nnz=self.length)

    def check(self) -> None:
        if self._allreduce is not None and self._allreduce.on_device:
            self._allreduce.check()

    def close(self) -> None:
        if self._allreduce is not None:
            self._allreduce.free()
            self._allreduce = None
