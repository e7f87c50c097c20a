"""gTopk: a tree of merges that keep k, then a broadcast."""

from __future__ import annotations

from functools import partial

import numpy as np

from collectives.errors import FlaggedRanksError
from collectives.sparse import Entries, SparseVector, Vector
from collectives.tree import broadcast, parent_and_children
from oktopk.methods.base import SparseMethod
from oktopk.selection import Selection
from oktopk.step import Plan, StepResult
from oktopk.thresholds import kth_magnitude


def gtopk_words(k: int, ranks: int) -> float:
    """Words per rank of gTopk, averaged over the ranks: every rank but rank 0 sends k entries up and gets k back."""
    return 4 * k * (ranks - 1) / ranks


def gtopk_busiest_words(k: int, ranks: int) -> float:
    """Words that rank 0 sends in gTopk's broadcast; as many reach it on the way up, 4k·ceil(log2 P) in all."""
    return 2.0 * k * (ranks - 1).bit_length()


class GTopk(SparseMethod):
    """Merges pairs of lists up a binomial tree, each time keeping the k largest sums; rank 0 broadcasts what is left.

    What a rank prunes on the way goes back into ITS residual, so that no mass is lost.

    Traffic: 4k(P-1)/P words a rank on average, 2k up and as much down for every rank but rank 0; on the path through rank 0,
        which makes the time, 4k ceil(log2 P). 2 ceil(log2 P) rounds. Control: one allgather of 2 int64.
    Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification, ICDCS 2019.
    """

    name = "gtopk"
    writes_out = False

    def exchange(self, selection: Selection, out: Vector | None, plan: Plan) -> StepResult:
        transport, workspace = self.transport, self.transport.workspace
        largest = max(plan.k, int(self.gather_counts(selection).max()))
        parent, children = parent_and_children(transport.rank, transport.size)
        pruned: list[SparseVector] = []

        # a merge reads two lists from one pool, and writes beside them
        pool = workspace.entries("merge", 4 * largest)
        entries = pool[: selection.packed.nnz]
        entries[:] = selection.packed.entries
        for number, child in enumerate(children):
            with plan.timer.stage("exchange"):
                incoming = pool[largest : 2 * largest]
                arrived = transport.receive_counted(incoming, child)
            with plan.timer.stage("reduce"):
                begins = np.array([0, largest], np.int64)
                ends = begins + np.array([len(entries), arrived])
                merged = pool[2 * largest :]
                nnz, _ = transport.kernels.sum_sorted_lists(pool, begins, ends, 0, self.length, 1, merged)
                rest = workspace.entries(f"pruned {number}", max(nnz, 1))
                kept, dropped = self._keep_k(merged[:nnz], plan.k, pool[:largest], rest)
                entries = pool[:kept]
                if dropped:
                    pruned.append(SparseVector(rest[:dropped], self.length))
        with plan.timer.stage("exchange"):
            if parent is not None:
                transport.wait(transport.send(entries, parent, even_if_empty=True))
        with plan.timer.stage("allgather"):
            gathered = workspace.entries("gathered", largest)
            if parent is None:
                gathered[: len(entries)] = entries
            nnz = broadcast(gathered, len(entries), transport)
            # a sum that is not finite is larger than what was pruned, so that every rank has it
            if transport.size > 1 and self.kernels.count_nonfinite(gathered[:nnz]):
                raise FlaggedRanksError([])
        return self.result(selection, SparseVector(gathered[:nnz], self.length), returned=tuple(pruned))

    def _keep_k(self, merged: Entries, k: int, kept: Entries, rest: Entries) -> tuple[int, int]:
        """Split a merged list into its k largest sums, ties by lowest index, and the rest; returns both counts."""
        bits, larger = 1, 0
        if len(merged) > k:
            bits, larger, _ = kth_magnitude(partial(self.kernels.magnitude_histogram, merged), k)
        return self.transport.kernels.split_at_least(merged, bits, k - larger, kept, rest)
