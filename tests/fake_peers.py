"""Peer memory without GPUs: what the kernels of a step tell each other goes over MPI, and the host finds what it would on a GPU.

It stands where `oktopk.cuda.p2p_step.P2PStep` does: what the host makes of a step among peers, deferred or not, is tested
on any machine. What kernels compute, and when, is not.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from collectives.cpu import kernels as lists_kernels
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.split_and_reduce import RegionLists
from oktopk.cpu import kernels
from oktopk.error_feedback import ErrorFeedback
from oktopk.results import StageTimer
from oktopk.selection import TIED, most_equal
from oktopk.settings import Settings, selection_cap
from oktopk.thresholds import CANDIDATES, candidate_bits, choose_candidate, kth_magnitude

_POOL, _SMALL_POOL = 3, 4096


class FakePeers:
    """As P2PStep."""

    def __init__(self, transport: MpiTransport, length: int, settings: Settings) -> None:
        self._transport, self._length, self._settings = transport, length, settings
        self._k = self._nearest = 0
        self._open = True

    def upcoming_epoch(self) -> int:
        return 0

    def abort(self, epoch: int) -> None:
        pass

    def check_abort(self) -> None:
        pass

    def fits(self, k: int) -> bool:
        return self._k == k

    def prepare(self, k: int) -> None:
        self._k = k
        self._transport.comm.Barrier()

    def select(
        self, gradient: NDArray[np.float32], residual: NDArray[np.float32], bits: int
    ) -> tuple[int, int, list[int]]:
        packing = kernels.accumulate_select(gradient, residual, bits, self._packed)
        return packing.nnz, packing.nonfinite, self._cuts(min(packing.nnz, 2 * self._k))

    def select_exact(
        self, gradient: NDArray[np.float32], residual: NDArray[np.float32], lowest: int
    ) -> SimpleNamespace:
        k, packed = self._k, self._packed
        packing = kernels.accumulate_select(gradient, residual, lowest, packed)
        short = bool(packing.nonfinite) or not k <= packing.nnz <= 2 * k
        found = SimpleNamespace(
            candidates=packing.nnz, nonfinite=packing.nonfinite, short=short, nnz=0, bits=0, splits=[]
        )
        if not short:
            found.nnz, found.bits, found.candidates = self._cut_down(packing.nnz)
            found.splits = self._cuts(found.nnz)
        return found

    def launch(
        self,
        gradient: NDArray[np.float32],
        vectors: ErrorFeedback,
        bits: tuple[int, int],
        boundaries: NDArray[np.int64],
        selected: tuple[int, int] | None = None,
        exact: bool = False,
        timed: bool = False,
        cut_to_k: bool = False,
        deferred: bool = False,
    ) -> None:
        residual, update, velocity = vectors.residual, vectors.update, vectors.velocity
        comm, rank, ranks = self._transport.comm, self._transport.rank, self._transport.size
        vectors.clear_update()
        cut = 0, 0
        if selected is None:
            packing = kernels.accumulate_select(gradient, residual, bits[0], self._packed)
            selected = packing.nnz, packing.nonfinite
            least = self._k if cut_to_k else selection_cap(self._k) + 1
            if least <= packing.nnz <= 2 * self._k and not packing.nonfinite:
                left, kth, candidates = self._cut_down(packing.nnz)
                selected, cut = (left, 0), (candidates, kth)
        nnz, nonfinite = selected
        mine = self._packed[: min(nnz, 2 * self._k)].copy()
        offsets = lists_kernels.region_offsets(mine, boundaries)
        notes = comm.allgather((nnz, nonfinite, mine, offsets))
        self._selected = SimpleNamespace(
            nnz=nnz,
            nonfinite=nonfinite,
            offsets=offsets.tolist(),
            candidates=cut[0],
            bits=cut[1],
            splits=self._cuts(len(mine)),
        )
        flagged = tuple(source for source, note in enumerate(notes) if note[1])
        if flagged and deferred:
            kernels.undo_accumulate(gradient, residual)
        room = max(_POOL * self._k, min(ranks * selection_cap(self._k), _SMALL_POOL))
        incoming = np.sum([np.diff(theirs) for *_, theirs in notes], axis=0).max()
        over, overflowed = any(note[0] > selection_cap(self._k) for note in notes), bool(incoming > room)
        if flagged or over or overflowed:
            overflowed = overflowed and not (flagged or over)
            self._outcome = SimpleNamespace(stopped_at="selection", flagged=flagged, overflowed=overflowed)
            return
        sources = [(rank - i) % ranks for i in range(ranks)]
        parts = [notes[source][2][slice(*notes[source][3][rank : rank + 2])] for source in sources]
        ends = np.cumsum([len(part) for part in parts])
        self._lists = RegionLists(
            np.concatenate(parts),
            ends - [len(part) for part in parts],
            ends,
            int(boundaries[rank]),
            int(boundaries[rank + 1]),
            self._transport,
        )
        self._transport.traffic.count(8 * (nnz - offsets[rank + 1] + offsets[rank]), 0)
        self._vectors = update, [vector for vector in (residual, velocity) if vector is not None], mine
        self._apply(self._name(bits[1]) if exact else self._follow(bits[1], deferred))

    def _apply(self, named: tuple[NDArray[np.void], int, int] | None) -> None:
        """Gather and apply what the ranks keep; None: the step stops."""
        if named is None:
            self._outcome = SimpleNamespace(
                stopped_at="threshold",
                flagged=(),
                overflowed=False,
                skewed=self._one_sided,
                nearest=self._nearest,
            )
            return
        kept, threshold, missed = named
        update, vectors, mine = self._vectors
        ranks = self._transport.size
        gathered = np.concatenate(self._transport.comm.allgather(kept))
        self._transport.traffic.count(8 * (ranks - 1) * len(kept), 0)
        kernels.write_scaled(update, gathered, 1.0 / ranks if self._settings.average else 1.0)
        for vector in vectors:
            kernels.clear_common(vector, mine, gathered)
        self._outcome = SimpleNamespace(
            stopped_at="", flagged=(), overflowed=False, bits=threshold, missed=missed, gathered=gathered
        )

    def go_exact(self, lowest: int) -> SimpleNamespace:
        self._apply(self._name(lowest))
        return self._outcome

    def selected(self) -> SimpleNamespace:
        return self._selected

    def outcome(self, exact: bool) -> SimpleNamespace:
        assert self._open
        return self._outcome

    def lists(self) -> RegionLists:
        return self._lists

    def time_stages(self, timer: StageTimer) -> None:
        pass

    def close(self) -> None:
        self._open = False

    @property
    def _packed(self) -> NDArray[np.void]:
        return self._transport.workspace.entries("packed", 2 * self._k + kernels.BLOCK)

    def _cut_down(self, nnz: int) -> tuple[int, int, int]:
        """(entries, bits) of what is left when a list is cut down to its top k, and the candidates that `kth.cu` reports."""
        candidates = self._packed[:nnz]
        bits, larger, equal = kth_magnitude(
            lambda level, prefix: kernels.magnitude_histogram(candidates, level, prefix), self._k
        )
        left = lists_kernels.take_at_least(candidates, bits, self._k - larger, candidates)
        return left, bits, TIED if equal > most_equal(self._k) else nnz

    def _cuts(self, nnz: int) -> list[int]:
        cuts = lists_kernels.equal_count_splits(self._packed[:nnz], self._length, self._transport.size)
        return [int(cut) for cut in cuts]

    def _skewed(self, counts: NDArray[np.int64]) -> bool:
        ranks, trigger = len(counts), self._settings.balance_trigger
        self._one_sided = ranks > 2 and bool(counts.max() * ranks > trigger * counts.sum())
        return self._one_sided

    def _name(self, lowest: int) -> tuple[NDArray[np.void], int, int] | None:
        """What this rank keeps by the k-th largest sum of all ranks, as `kth.cu` does; None where it stops."""
        comm, rank = self._transport.comm, self._transport.rank
        self._one_sided = False
        sums = self._lists.sums(lowest).copy()
        if comm.allreduce(len(sums)) < self._k:
            return None
        bits, larger, _ = kth_magnitude(
            lambda level, prefix: comm.allreduce(kernels.magnitude_histogram(sums, level, prefix)), self._k
        )
        edges = np.array([bits, bits + 1], np.int32)
        counts = np.array(comm.allgather(lists_kernels.count_at_least(sums, edges)))
        above, ties = counts[:, 1], counts[:, 0] - counts[:, 1]
        ties = np.clip(self._k - larger - (np.cumsum(ties) - ties), 0, ties)
        if self._skewed(above + ties):
            return None
        kept = np.empty(len(sums) + 1, ENTRY)
        return kept[: lists_kernels.take_at_least(sums, bits, int(ties[rank]), kept)], bits, 0

    def _follow(self, expected: int, deferred: bool) -> tuple[NDArray[np.void], int, int] | None:
        """What this rank keeps by the rung that fits, as `decide.cu` does; None where it stops."""
        k, settings = self._k, self._settings
        self._one_sided = False
        sums = self._lists.counted(expected, CANDIDATES)
        counts = np.array(self._transport.comm.allgather(sums.counts))[:, :-1]
        totals = counts.sum(axis=0)
        choice = choose_candidate(
            totals, expected, k, settings.drift_tolerance, may_go_exact_now=not deferred
        )
        rung, nearest, self._nearest = choice.candidate, choice.nearest, int(totals[choice.nearest])
        if choice.needs_exact:
            return None
        if self._skewed(counts[:, rung]):
            return None
        bits = candidate_bits(expected, rung)
        return sums.take(bits, int(sums.counts[rung])).copy(), bits, int(CANDIDATES[nearest])
