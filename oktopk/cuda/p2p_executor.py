"""Ok-Topk's step among the GPUs of one host: one graph of kernels through peer memory, and one wait, for what was decided.

Nothing that the host must know stands between selecting and applying, so nothing waits for it: the kernels tell each other
what was selected and counted, and decide alike on all ranks. A selection over the cap they cut down to the top k. Where a step
is out of the ordinary (a gradient that is not finite, a selection that overflows its list, a threshold that missed) they stop,
on all ranks at the same place, and the host takes over from there, or has the exact threshold named. A regular step is launched
as a whole; an exact one selects first, so that the host may agree on new regions. A deferred step is launched as a whole, too,
not waited for until the next one begins, and given up where it stopped; it stops for a threshold only where that missed by far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import DeviceEntries
from collectives.cuda.layouts import (
    BAD_REGIONS,
    BAD_SELECTION,
    CUT_TO_K,
    DEFERRED,
    NOT_FINITE,
    NUM_CANDIDATES,
    SKEWED,
)
from collectives.mpi_cuda import DeviceTransport
from collectives.sparse import SparseVector
from collectives.split_and_reduce import RegionLists
from oktopk.cpu.kernels import LEVELS
from oktopk.cuda.multi_tensor import pointer_of
from oktopk.cuda.p2p_graph import P2PGraph
from oktopk.results import StageTimer
from oktopk.settings import Settings
from oktopk.thresholds import CANDIDATES

if TYPE_CHECKING:
    from oktopk.cuda.kernels import DeviceKernels

_RUNG_BITS = CANDIDATES.tolist()
_DIGITS = sum(1 << width for _, width in LEVELS)
_MOST_GRAPHS = 8  # of gradients that live elsewhere


@dataclass(slots=True)
class Named:
    """An exact local selection.

    Attributes:
        candidates, nonfinite: what the pass found.
        short: the candidates are too few or too many: they are as they were, and the host must look.
        nnz: of the selection, which takes their place.
        bits: the k-th largest magnitude.
        cuts: P - 1 indices that split the selection into equal counts.
    """

    candidates: int
    nonfinite: int
    short: bool
    nnz: int
    bits: int
    cuts: list[int]


@dataclass(slots=True)
class Selected:
    """What the kernels of a step selected.

    Attributes:
        nnz, nonfinite: as they were packed, or cut down.
        points: P + 1 integers, where each region begins in the list.
        candidates: of which the list was cut down to the top k; 0 where it is as it was packed.
        bits: the k-th largest magnitude, where the list was cut.
        cuts: P - 1 indices that split the list into equal counts, where it is not empty.
    """

    nnz: int
    nonfinite: int
    points: list[int]
    candidates: int
    bits: int
    cuts: list[int]


@dataclass(slots=True)
class Outcome:
    """How far a step came.

    Attributes:
        stopped_at: "" when all will be applied; "selection" when nothing was exchanged; "threshold" when the lists of this
            rank's region are there, and nothing was kept.
        flagged: ranks whose gradients were not finite, where the step stopped for them.
        crowded: the step stopped since a region got more than there is room for.
        skewed: it stopped at its threshold since one rank would keep far more than the others.
        nearest: sums that reach the best rung, where it stopped since none fits.
        bits, missed: the global threshold, and how far the expected one was from the best one; gathered: all that was applied;
            only when all is done.
    """

    stopped_at: str
    flagged: tuple[int, ...] = ()
    crowded: bool = False
    skewed: bool = False
    nearest: int = 0
    bits: int = 0
    missed: int = 0
    gathered: DeviceEntries | None = None


class P2PStep:
    """Runs the steps of one instance of Ok-Topk.

    Args:
        kernels: of this rank's gradients.
        transport: of the ranks, which all use peer memory.
        length: elements of the gradient (n).
        settings: equal on all ranks.
    """

    def __init__(
        self, kernels: DeviceKernels, transport: DeviceTransport, length: int, settings: Settings
    ) -> None:
        self._kernels, self._transport, self._length = kernels, transport, length
        self._settings = settings
        self._device = transport.device
        self._launches: P2PGraph | None = None
        self._epoch = self._selected_at = 0  # of the last notes, and of the selection they go back to
        self._vectors = (0, 0, 0, 0)
        self._boundaries: NDArray[np.int64] | None = None
        # by where the vectors live, what reads the gradient, and `unaided`; None: seen once
        self._graphs: dict[tuple[int, ...], Any] = {}

    def fits(self, k: int) -> bool:
        """Whether windows and lists are as this k needs them; the same on all ranks."""
        return self._launches is not None and self._launches.k == k

    def prepare(self, k: int) -> None:
        """Lay everything out for a k. Collective: every rank must call.

        Raises:
            RuntimeError: a rank has no memory for it; on every rank alike.
        """
        self.close()
        self._launches = P2PGraph(self._kernels, self._transport, self._length, k, self._settings)

    def launch(
        self,
        gradient: Any,
        residual: Any,
        update: Any,
        velocity: Any,
        bits: tuple[int, int],
        boundaries: NDArray[np.int64],
        support: SparseVector | None,
        clear: Callable[[], None],
        selected: tuple[int, int] | None = None,
        exact: bool = False,
        timed: bool = False,
        exactly: bool = False,
        unaided: bool = False,
    ) -> None:
        """Put one step on the stream. Collective: every rank must call; then `outcome`, and last `finish`.

        Args:
            gradient: [n], read; an array, or in pieces, which may lie elsewhere in every step.
            residual: float32[n]; becomes gradient + residual, less what was applied.
            update: float32[n]; becomes the sum over the ranks, scaled.
            velocity: float32[n], cleared as the residual is, or None.
            bits: the local threshold, and the expected global one or the least that a sum must reach to be looked at.
            boundaries: int64[P + 1], equal on all ranks.
            support: where `update` is not zero, None for anywhere.
            clear: zeroes it there; called where no kernel of the step does.
            selected: (nnz, nonfinite) when the selection lies in the buffer already, and nothing is to be accumulated.
            exact: name the exact global threshold.
            timed: time the stages on the device, where the whole step runs there.
            exactly: cut this rank's selection down to its top k wherever it holds as many, not only above the cap.
            unaided: the host will not help. Where some rank's gradient is not finite `residual` is given back as it was, to
                rounding, which the caller has to do else; and a threshold that missed is moved to the best rung that keeps
                between k/2 and 5k/4 sums, where there is one. Equal on all ranks.

        Traffic: 2 words a selected entry outside the own region, read by its owner; 2(P-1) words a kept sum, read by all.
            Control: notes of P + 3, 65 and no words to every rank, or 4096 for 65 where the threshold is named exactly.
        """
        launches = self._launches
        assert launches is not None
        self._epoch = self._selected_at = self._device.next_epoch()
        if boundaries is not self._boundaries:
            self._boundaries = boundaries
            if launches.set_regions(boundaries):
                self._graphs.clear()
        to_clear = 0
        if support is not None and (not support.nnz or support.entries.pointer == launches.gathered.pointer):  # type: ignore[attr-defined]
            to_clear = support.nnz
        else:
            clear()
        ways = (CUT_TO_K if exactly else 0) | (DEFERRED if unaided else 0)
        launches.set_step(self._epoch, bits[0], bits[1], to_clear, ways)
        self._device.pending = True
        vectors = (
            pointer_of(gradient),
            residual.data.ptr,
            update.data.ptr,
            0 if velocity is None else velocity.data.ptr,
        )
        self._vectors = vectors
        stream = self._device.stream
        reader = launches.set_gradient(gradient)
        launches.timed = timed and selected is None
        if selected is not None:
            launches.upload_step(stream.ptr)
            launches.put_selection(*selected, stream.ptr)
            launches.enqueue(vectors, stream.ptr, exact=exact, deferred=unaided)
            return
        captured = not (timed or exact)
        graph = self._graphs.get((*vectors, reader, unaided)) if captured else None
        if graph is None and captured:
            graph = self._first_seen(vectors, reader, unaided)
        if graph is None:
            launches.enqueue_whole(vectors, stream.ptr, exact=exact, deferred=unaided)
        else:
            graph.launch(stream)

    def _first_seen(self, vectors: tuple[int, ...], reader: int, unaided: bool) -> Any:
        """A graph of the step, for vectors that come a second time; None for those that may never come back."""
        assert self._launches is not None
        key = *vectors, reader, unaided
        if key not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
            return None
        capturing = cupy.cuda.Stream(non_blocking=True)
        capturing.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            self._launches.enqueue_whole(vectors, capturing.ptr, exact=False, deferred=unaided)
        except BaseException:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # half a step is no graph
                capturing.end_capture()
            raise
        graph = self._graphs[key] = capturing.end_capture()
        return graph

    def selected(self) -> Selected:
        """The selection that `launch` made; there once the outcome is."""
        assert self._launches is not None
        words = self._launches.selected.read(self._selected_at)
        after = 3 + self._transport.size
        return Selected(
            words[0], words[1], words[2:after], words[after], words[after + 1], words[after + 2 :]
        )

    def name_exactly(self, lowest: int) -> Outcome:
        """Go on with a step that stopped since no rung fits: name the exact global threshold, and apply. Collective.

        Args:
            lowest: bits that a sum must reach to be looked at.

        Returns:
            As `outcome`; stopped again where fewer than k sums reach `lowest`, or one rank would keep far more than the others.

        Traffic: control: 4096 words to every rank.
        """
        launches, transport = self._launches, self._transport
        assert launches is not None
        self._epoch = self._device.next_epoch()
        launches.set_step(self._epoch, 0, lowest, 0, 0)
        launches.enqueue_exact(self._vectors, self._device.stream.ptr)
        self._device.pending = True
        others = transport.size - 1
        transport.traffic.control_words += others * _DIGITS
        transport.traffic.control_messages += len(LEVELS)
        return self._kept(*launches.decided.read(self._epoch), exact=True)

    def outcome(self, exact: bool) -> Outcome:
        """What the ranks decided, and the traffic counted; waits for that alone.

        Args:
            exact: as `launch` was told.
        """
        transport, launches = self._transport, self._launches
        assert launches is not None
        rank, ranks = transport.rank, transport.size
        others = ranks - 1
        decided = launches.decided.read(self._epoch)
        stop, counts = decided[0], decided[5:]
        traffic = transport.traffic
        traffic.control_words += others * (3 + ranks)
        traffic.control_messages += 1
        if stop in (BAD_SELECTION, NOT_FINITE, BAD_REGIONS):
            flags = counts if stop == NOT_FINITE else []
            flagged = tuple(source for source, found in enumerate(flags) if found)
            return Outcome("selection", flagged, crowded=stop == BAD_REGIONS)
        selected = self.selected()
        points = selected.points
        traffic.words += 2 * (selected.nnz - points[rank + 1] + points[rank])
        for other in range(ranks):
            traffic.messages += other != rank and points[other] < points[other + 1]
        traffic.control_words += others * (_DIGITS if exact else NUM_CANDIDATES)
        traffic.control_messages += len(LEVELS) if exact else 1
        return self._kept(*decided, exact=exact)

    def _kept(
        self, stop: int, nearest: int, bits: int, again: int, total: int, *counts: int, exact: bool
    ) -> Outcome:
        """What became of the sums, by the words of a decision."""
        assert self._launches is not None
        if stop:
            return Outcome("threshold", skewed=stop == SKEWED, nearest=total)
        traffic, rank, others = self._transport.traffic, self._transport.rank, self._transport.size - 1
        traffic.control_messages += again
        traffic.words += 2 * others * counts[rank]
        traffic.messages += others if counts[rank] else 0
        missed = 0 if exact else _RUNG_BITS[nearest]
        return Outcome("", bits=bits, missed=missed, gathered=self._launches.gathered[:total])

    def finish(self, timer: StageTimer) -> None:
        """Book the stages of a timed step, which is waited for; any other goes on on the stream."""
        assert self._launches is not None
        if self._launches.timed:
            self._device.synchronize()
            for stage, seconds in self._launches.stage_seconds():
                timer.add(stage, seconds)

    def select_exact(self, gradient: Any, residual: Any, lowest: int) -> Named:
        """Accumulate and select the exact top k, from what reaches `lowest`; waits.

        Args:
            gradient: [n], read.
            residual: float32[n]; becomes gradient + residual.
        """
        launches = self._launches
        assert launches is not None
        launches.enqueue_exact_selection(gradient, residual, lowest, self._device.stream.ptr)
        self._device.synchronize()
        nnz, _, candidates, short, bits = launches.taken[:5]
        cuts = launches.splits[: self._transport.size - 1]
        return Named(candidates, launches.packed_report[1], bool(short), nnz, bits, cuts)

    def select(self, gradient: Any, residual: Any, bits: int) -> tuple[int, int, list[int]]:
        """Accumulate and select what reaches `bits`; waits.

        Args:
            gradient: [n], read.
            residual: float32[n]; becomes gradient + residual.

        Returns:
            (nnz, nonfinite, P - 1 indices that split into equal counts what of it there is room for).
        """
        launches = self._launches
        assert launches is not None
        launches.enqueue_selection(gradient, residual, bits, self._device.stream.ptr)
        self._device.synchronize()
        nnz, nonfinite = launches.packed_report[:2]
        return nnz, nonfinite, launches.splits[: self._transport.size - 1]

    def lists(self) -> RegionLists:
        """The contributions to this rank's region, after a step that stopped for its threshold."""
        assert self._boundaries is not None and self._launches is not None
        self._device.synchronize()
        rank, ranks = self._transport.rank, self._transport.size
        incoming = self._launches.collected[:ranks]
        counts = np.array([incoming[(rank - i) % ranks] for i in range(ranks)], np.int64)
        ends = counts.cumsum()
        lower, upper = (int(edge) for edge in self._boundaries[rank : rank + 2])
        return RegionLists(self._launches.pool, ends - counts, ends, lower, upper, self._transport)

    def close(self) -> None:
        """Free the windows. Collective."""
        if self._launches is not None:
            self._launches.close()
        self._launches, self._boundaries = None, None
        self._graphs.clear()
