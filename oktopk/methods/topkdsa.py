"""TopkDSA: SparCML's dynamic sparse allreduce."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import GatheredRegions, allgather_regions
from collectives.errors import FlaggedRanksError
from collectives.sparse import SparseVector
from collectives.split_and_reduce import split_and_reduce
from oktopk.methods.base import SparseMethod
from oktopk.regions import equal_boundaries
from oktopk.selection import Selection
from oktopk.step import Plan, StepResult


def topkdsa_words(k: int, length: int, ranks: int) -> tuple[float, float]:
    """The least and the most words per rank of TopkDSA, averaged over the ranks.

    2k(P-1)/P to split, and to gather 2k(P-1)/P where all supports coincide, at most n(P-1)/P where every region is dense.
    """
    share = (ranks - 1) / ranks
    return 4 * k * share, max(4 * k, 2 * k + length) * share


class TopkDSA(SparseMethod):
    """Split into equal regions, reduce sparsely, allgather each region as COO or, once fill-in makes that longer, dense.

    The update is the whole sum of the local top ks.

    Traffic: 4k(P-1)/P words a rank where the supports coincide, up to (2k+n)(P-1)/P where fill-in makes every region dense;
        P + ceil(log2 P) messages. Control: one alltoall and one allgather of 2 int64.
    Source: Renggli et al., SparCML, SC 2019.
    """

    name = "topkdsa"

    def exchange(self, selection: Selection, out: NDArray[np.float32] | None, plan: Plan) -> StepResult:
        transport, bucket_rounds = self.transport, self.settings.bucket_rounds
        boundaries = equal_boundaries(self.length, transport.size)
        flag = selection.flagged
        with plan.timer.stage("exchange"):
            lists = split_and_reduce(
                selection.packed, boundaries, transport, flag, bucket_rounds=bucket_rounds
            )
        with plan.timer.stage("reduce"):
            sums, nonfinite = lists.checked_sums()
        with plan.timer.stage("allgather"):
            counts, nonfinite_sums = transport.allgather_control(np.array([len(sums), nonfinite], np.int64)).T
            if nonfinite_sums.any():
                raise FlaggedRanksError([])
            regions = allgather_regions(sums, counts, boundaries, transport)
        assert out is not None, "it writes out"
        update = self._write_if_dense(regions, out, plan.scale)
        return self.result(selection, update, global_nnz=int(counts.sum()))

    def _write_if_dense(
        self, regions: GatheredRegions, out: NDArray[np.float32], scale: float
    ) -> SparseVector | None:
        """The update as COO; or None, once it is written to `out` because a region is dense."""
        if not regions.dense.any():
            return SparseVector(regions.entries, self.length)
        for region in range(self.transport.size):
            if regions.dense[region]:
                lower, upper = regions.boundaries[region : region + 2]
                self.kernels.write_block_scaled(regions.block(region), scale, out[lower:upper])
            else:
                self.kernels.write_scaled(out, regions.block(region), scale)
        return None
