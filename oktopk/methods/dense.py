"""Dense: every entry, by Rabenseifner's allreduce."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import DenseAllreduce
from collectives.transport import FlaggedRanksError
from oktopk.methods.base import Method
from oktopk.step import Plan, StepResult


class Dense(Method):
    """The exact sum; nothing stays behind.

    Traffic: `collectives.dense_allreduce.dense_words`. Control: one allgather and one allreduce of a flag.
    """

    name = "dense"
    sparse = False
    _allreduce: DenseAllreduce | None = None

    def prepare(self, out: NDArray[np.float32]) -> None:
        self._allreduce = DenseAllreduce(out, self.transport)

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        nonfinite = self.kernels.accumulate(gradient, residual, out)
        plan.timer.record("select")
        flags = self.transport.allgather_control(np.array([nonfinite > 0 or overflowed], np.int64))
        if flags.any():
            raise FlaggedRanksError(np.flatnonzero(flags).tolist())
        assert self._allreduce is not None
        finite = self._allreduce.run(plan.scale)
        if self.transport.allreduce_control(np.array([not finite], np.int64))[0]:
            raise FlaggedRanksError([])
        plan.timer.record("allreduce")
        return StepResult(None, None, local_exact=True, local_nnz=self.length, global_nnz=self.length)

    def close(self) -> None:
        if self._allreduce is not None:
            self._allreduce.free()
            self._allreduce = None
