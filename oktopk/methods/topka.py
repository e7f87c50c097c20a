"""TopkA: every rank gets every rank's selection, and sums."""

from __future__ import annotations

import numpy as np

from collectives.allgatherv import allgatherv
from collectives.errors import FlaggedRanksError
from collectives.sparse import SparseVector, Vector
from collectives.split_and_reduce import RegionLists
from oktopk.methods.base import SparseMethod
from oktopk.selection import Selection
from oktopk.step import Plan, StepResult


def topka_words(k: int, ranks: int) -> float:
    """Words per rank of TopkA and Gaussiank: an allgather of k entries from every rank."""
    return 2.0 * k * (ranks - 1)


class TopkA(SparseMethod):
    """Allgather of the local top ks; the update is their whole sum, up to kP entries.

    Traffic: 2k(P-1) words and ceil(log2 P) rounds a rank. Control: one allgather of 2 int64.
    Source: Renggli et al., SparCML, SC 2019; Li & Hoefler, PPoPP 2022, table 1.
    """

    name = "topka"
    writes_out = False

    def exchange(self, selection: Selection, out: Vector | None, plan: Plan) -> StepResult:
        with plan.timer.stage("allgather"):
            transport, counts = self.transport, self.gather_counts(selection)
            ends = np.cumsum(counts)
            gathered = transport.workspace.entries("gathered", int(ends[-1]))
            allgatherv(gathered, counts, transport, own=selection.packed.entries)
        with plan.timer.stage("reduce"):
            lists = RegionLists(gathered, ends - counts, ends, 0, self.length, transport)
            sums, nonfinite = lists.checked_sums()
            if nonfinite:  # on all ranks alike
                raise FlaggedRanksError([])
        return self.result(selection, SparseVector(sums, self.length))
