"""Dense: every entry, by Rabenseifner's allreduce."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.transport import FlaggedRanksError
from oktopk.methods.base import Method
from oktopk.settings import Settings
from oktopk.step import Plan, StepResult


class Dense(Method):
    """The exact sum; nothing stays behind.

    Traffic: `collectives.dense_allreduce.dense_words`; through peer memory `collectives.cuda.dense_p2p.DenseP2P.nbytes_sent`.
    Control: one allgather of a flag, and over messages one allreduce.
    """

    name = "dense"
    sparse = False
    _allreduce: Any = None

    @classmethod
    def p2p_unavailable_reason(cls, settings: Settings) -> str:
        return ""

    def prepare(self, out: NDArray[np.float32]) -> None:
        self._allreduce = self.transport.dense_allreduce(out, self.settings.timeout)

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
        finite = self._allreduce.run(plan.scale)
        if not self._allreduce.same_everywhere:
            finite = not self.transport.allreduce_control(np.array([not finite], np.int64))[0]
        if not finite:
            raise FlaggedRanksError([])
        plan.timer.record("allreduce")
        return StepResult(None, None, local_exact=True, local_nnz=self.length, global_nnz=self.length)

    def close(self) -> None:
        if self._allreduce is not None:
            self._allreduce.free()
            self._allreduce = None
