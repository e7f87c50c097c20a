"""Union: all ranks send the same entries, those that any rank chose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import ALONE, PLAIN, CodedIndices, wire_layout
from collectives.errors import FlaggedRanksError
from collectives.sparse import Entries, Kernels, SparseVector, Vector
from collectives.sum_values import CodedValues, sum_values, value_words
from collectives.transport import Transport
from oktopk.methods.base import SparseMethod
from oktopk.selection import Selection
from oktopk.settings import Settings
from oktopk.shard_group import WHOLE, ShardGroup
from oktopk.step import Addend, Plan, StepResult


def union_words(chosen: Sequence[int], length: int) -> tuple[float, float]:
    """The least and the most words per rank of plain values, averaged over the ranks.

    (P-1)/P of what all chosen indices take, coded alone, and 2u(P-1)/P for the values at the u chosen indices: u is the largest
    of the numbers where ranks choose the same, and their sum where no two do. Each rank's block has an even number of words.

    Args:
        chosen: entries that each rank chose.
        length: elements of the dense vector (n).
    """
    ranks = len(chosen)
    indices = sum(wire_layout(ALONE, count, 0, length).words for count in chosen) * (ranks - 1) / ranks
    least, most = (value_words("plain", count, ranks) for count in (max(chosen), min(sum(chosen), length)))
    return indices + least, indices + most


class SharedSupport(SparseMethod):
    """Each rank chooses a P-th of k; all ranks send their values at all chosen indices, and all sums are applied.

    So every applied entry is the sum of all ranks' values, and is cleared on all ranks, even where the sum is zero. A step of
    exact thresholds applies at most P·ceil(k/P) entries, any other one 5/4 of that.

    The chosen indices travel alone, coded on every wire. The values travel without an index, as all ranks know the list.

    Traffic: at most k(P-1)/P·(2 + log2(nP/k)) bits a rank for the chosen indices, and up to 3 words a list; at most 2k(P-1)/P
        values, see `collectives.sum_values`; P + 2 log2 P messages. Control: one allgather of 2 int64, and of a step's token.
    Source: own; Chen et al., ScaleCom, NeurIPS 2020, has the ranks take turns to choose for all.
    """

    name = "union"
    writes_out = False
    coded = True

    def __init__(
        self,
        length: int,
        transport: Transport,
        kernels: Kernels,
        settings: Settings,
        shard_group: ShardGroup = WHOLE,
    ) -> None:
        super().__init__(length, transport, kernels, settings, shard_group)
        of_rank = transport.kernels, transport.workspace, transport.size, transport.ranks
        self._values = CodedValues(settings.wire if transport.size > 1 else "plain", *of_rank)
        # knows what is damaged of the values, too
        self.codec = CodedIndices(self._values, *of_rank) if transport.size > 1 else PLAIN
        self._residual: Vector | None = None  # of the step that runs

    @property
    def reads_displacements(self) -> bool:
        return True

    @classmethod
    def flat_reason(cls) -> str:
        return ""

    @classmethod
    def local_k(cls, k: int, ranks: int) -> int:
        return max(1, -(-k // ranks))

    def reduce(
        self,
        gradient: Addend,
        residual: Vector | None,
        out: Vector | None,
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        self._residual = residual
        plan = replace(plan, k=self.local_k(plan.k, self.transport.size))
        return super().reduce(gradient, residual, out, plan, overflowed)

    def exchange(self, selection: Selection, out: Vector | None, plan: Plan) -> StepResult:
        transport, values, settings = self.transport, self._values, self.settings
        sums = self.gather_support(selection, plan)  # indices alone, until their values are summed
        with plan.timer.stage("exchange"):
            sent = transport.workspace.entries("sent", len(sums))
            self.kernels.take_values(self._residual, sums, sent)
            errors = sum_values(sent, sums, transport, values, settings.bucket_rounds, settings.rotate)
            if values.wait_for_nonfinite():
                raise FlaggedRanksError([])
        result = self.result(
            selection,
            SparseVector(sums, self.length),
            returned=(SparseVector(errors, self.length),) if values.rounds else (),
            errors_stay=values.rounds,
            rounding=values.rounding,
        )
        result.selected = SparseVector(sent, self.length)
        return result

    def gather_support(self, selection: Selection, plan: Plan) -> Entries:
        """ENTRY[u], the indices that any rank chose, ascending; equal on all ranks. Collective.

        Raises:
            FlaggedRanksError: some ranks' elements are not finite, or a list did not decode on GPUs; on every rank alike.
            ValueError: a list did not decode on CPUs, as `balance_and_allgatherv`.
        """
        transport, chosen = self.transport, selection.packed.entries
        with plan.timer.stage("allgather"):
            counts = self.gather_counts(selection)
            # values decode to 1: if they could cancel, an index that several ranks chose would be dropped
            lists = balance_and_allgatherv(
                chosen, counts, self.length, transport, trigger=math.inf, codec=self.codec
            )
        with plan.timer.stage("select"):
            ends = np.cumsum(counts)
            support = transport.workspace.entries("support", min(int(ends[-1]), self.length))
            nnz, _ = transport.kernels.sum_sorted_lists(
                lists.entries, ends - counts, ends, 0, self.length, 1, support
            )
        if self.codec.gathered_damage:  # of the lists, and so on all ranks
            raise FlaggedRanksError([])
        return support[:nnz]
