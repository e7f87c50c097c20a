"""Dense: every entry, by Rabenseifner's allreduce."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import DenseAllreduce
from collectives.transport import FlaggedRanksError
from oktopk.methods.base import Method, Plan, Reduction


class Dense(Method):
    """The exact sum; nothing stays behind.

    Traffic: `collectives.dense_allreduce.dense_words`. Control: one allgather of a flag.
    """

    name = "dense"
    sparse = False
    _allreduce: DenseAllreduce | None = None

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction:
        nonfinite = self.kernels.accumulate(gradient, residual, out)
        plan.timer.record("select")
        flags = self.transport.allgather_control(np.array([nonfinite > 0 or plan.nonfinite], np.int64))
        if flags.any():
            raise FlaggedRanksError(np.flatnonzero(flags).tolist())
        if self._allreduce is None or self._allreduce.vector is not out:
            self.close()
            self._allreduce = DenseAllreduce(out, self.transport)
        self._allreduce.run(plan.scale)
        plan.timer.record("allreduce")
        return Reduction(
            update=None,
            selected=None,
            returned=(),
            exact=True,
            local_nnz=self.length,
            global_nnz=self.length,
        )

    def close(self) -> None:
        if self._allreduce is not None:
            self._allreduce.free()
            self._allreduce = None
