"""Union: all ranks send the same entries, those that any rank chose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import ALONE, PLAIN, CodedIndices, make_codec, wire_layout
from collectives.cpu.kernels import magnitude_bits
from collectives.sparse import SparseVector
from collectives.split_and_reduce import split_and_reduce, sum_and_gather
from collectives.transport import Transport
from oktopk.methods.base import SparseMethod
from oktopk.regions import equal_boundaries
from oktopk.selection import Selection
from oktopk.settings import Settings
from oktopk.step import Plan, StepResult

_LEAST_SENT = 1 / 8
"""Of a rank's own threshold: what is smaller does not travel on a wire that rounds."""


def union_words(chosen: Sequence[int], length: int) -> tuple[float, float]:
    """The least and the most words per rank of plain entries, averaged over the ranks.

    (P-1)/P of what all chosen indices take, coded alone, and 4u(P-1)/P for the values at the u chosen indices: u is the largest
    of the numbers where ranks choose the same, and their sum where no two do.

    Args:
        chosen: entries that each rank chose.
        length: elements of the dense vector (n).
    """
    share = (len(chosen) - 1) / len(chosen)
    indices = sum(wire_layout(ALONE, count, 0, length).words for count in chosen)
    return (indices + 4 * max(chosen)) * share, (indices + 4 * sum(chosen)) * share


class SharedSupport(SparseMethod):
    """Each rank chooses a P-th of k; all ranks send their values at all chosen indices, and all sums are applied.

    So every applied entry is the sum of all ranks' values, and is cleared on all ranks. A step of exact thresholds applies at
    most P·ceil(k/P) entries, any other one 5/4 of that.

    The chosen indices travel alone, coded on every wire. The values travel by their positions in the list of these, which takes a
    coded entry 2 bits. A wire that rounds leaves out what is below 1/8 of a rank's own threshold: it stays in the residual.

    Traffic: at most k(P-1)/P·(2 + log2(nP/k)) bits a rank for the chosen indices, and up to 3 words a list; with plain entries at
        most 4k(P-1)/P words for the values; P + 2 log2 P messages, 2P more where sums that cancel leave blocks to be balanced.
        Control: two allgathers and one alltoall of 2 int64.
    Source: own; Chen et al., ScaleCom, NeurIPS 2020, has the ranks take turns to choose for all.
    """

    name = "union"
    writes_out = False
    coded = True

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        super().__init__(length, transport, kernels, settings)
        of_rank = transport.kernels, transport.workspace, transport.size, transport.ranks
        self._values = make_codec(settings.wire, *of_rank)
        # knows what is damaged of the values, too
        self.codec = CodedIndices(self._values, *of_rank) if transport.size > 1 else PLAIN
        self._residual: Any = None  # of the step that runs

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
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32] | None,
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        self._residual = residual
        plan = replace(plan, k=self.local_k(plan.k, self.transport.size))
        return super().reduce(gradient, residual, out, plan, overflowed)

    def exchange(self, selection: Selection, out: NDArray[np.float32] | None, plan: Plan) -> StepResult:
        transport, codec, timer = self.transport, self._values, plan.timer
        # a device may find only now that what the last step gathered did not decode
        selection = replace(selection, flag=selection.flagged or self.codec.gathered_damage)
        support = self.gather_support(selection, plan)
        with timer.stage("select"):
            sent = self.values_at(support, selection.threshold)
            boundaries = equal_boundaries(len(support), transport.size)
        with timer.stage("exchange"):
            rounds, rotate = self.settings.bucket_rounds, self.settings.rotate
            lists = split_and_reduce(
                sent,
                boundaries,
                transport,
                self.codec.gathered_damage,
                bucket_rounds=rounds,
                rotate=rotate,
                codec=codec,
            )
        with timer.stage("allgather"):
            trigger = self.settings.balance_trigger
            sums, update, _ = sum_and_gather(lists, boundaries, trigger, record=timer.record)
        with timer.stage("apply"):
            errors = (self.at_indices(sums.entries, support),) if codec.rounds else ()
            sent, update = (self.at_indices(each.entries, support) for each in (sent, update))
        result = self.result(
            selection,
            update,
            returned=errors,
            errors_stay=codec.rounds,
            rounding=codec.rounding,
            only_applied=True,
        )
        result.selected = sent
        return result

    def gather_support(self, selection: Selection, plan: Plan) -> Any:
        """ENTRY[u], the indices that any rank chose, ascending; equal on all ranks. Collective.

        Raises:
            FlaggedRanksError: some ranks' elements are not finite; on every rank alike.
            ValueError: a list did not decode, as `balance_and_allgatherv`.
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
        return support[:nnz]

    def values_at(self, support: Any, threshold: float) -> SparseVector:
        """What this rank sends: its values at the chosen indices, by position in `support`, without zeros."""
        sent = self.transport.workspace.entries("sent", len(support))
        least = magnitude_bits(threshold * _LEAST_SENT) if self._values.rounds else 0
        taken = self.kernels.take_values(self._residual, support, max(1, least), sent)
        return SparseVector(sent[:taken], len(support))

    def at_indices(self, entries: Any, support: Any) -> SparseVector:
        """Entries by position as entries by index, in place."""
        self.kernels.to_indices(entries, support)
        return SparseVector(entries, self.length)
