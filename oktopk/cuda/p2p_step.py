"""The kernels of Ok-Topk's step among the GPUs of one host: one graph through symmetric memory, and one wait for its outcome.

The kernels exchange selections and counts, and decide alike on all ranks; no kernel waits for the host. They cut a selection
over the cap down to the top k. Where a gradient is not finite, a selection is too long or too short, or a threshold misses, all
ranks stop at the same place, and the host takes over or lets the kernels go on. A step is launched as a whole. One that renews
regions selects first, so that the host may agree on them, unless it is deferred; so does a rank that knows no good threshold. The
host waits for a deferred step when the next one begins, and gives it up where it stopped.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import DeviceEntries
from collectives.cuda.layouts import (
    ABORTED,
    BAD_REGIONS,
    BAD_SELECTION,
    BAD_SUMS,
    CUT_TO_K,
    DECISION_WORDS,
    DEFERRED,
    NOT_FINITE,
    NUM_COUNTERS,
    SHORT_BIT,
    SKEWED,
)
from collectives.device_transport import DeviceTransport
from collectives.sparse import ENTRY
from collectives.split_and_reduce import RegionLists
from collectives.symmetric_memory import abort_reasons
from collectives.traffic import WORD_BYTES
from oktopk.cpu.histograms import LEVELS
from oktopk.cuda.multi_tensor import pointer_of
from oktopk.cuda.p2p_graph import P2PGraph
from oktopk.error_feedback import ErrorFeedback
from oktopk.results import StageTimer
from oktopk.settings import Settings
from oktopk.thresholds import CANDIDATES

if TYPE_CHECKING:
    from oktopk.cuda.kernels import DeviceKernels

_CANDIDATE_BITS = CANDIDATES.tolist()
_DIGITS = sum(1 << width for _, width in LEVELS)
_ABORTED = "steps through peer memory cannot go on: {}. Continue from a checkpoint"
_MOST_GRAPHS = 8  # of gradients that live elsewhere


class _Kind(NamedTuple):
    """What a launch does.

    Attributes:
        exact: compute the exact global threshold.
        whole: from the gradient on; else what follows the selection.
    """

    exact: bool
    whole: bool


# others are rare
_CAPTURED = [
    _Kind(exact=False, whole=True),
    _Kind(exact=True, whole=True),
    _Kind(exact=True, whole=False),
]


@dataclass(slots=True)
class DeviceSelection:
    """What kernels selected.

    Attributes:
        nnz, nonfinite: entries of the selection, and elements that are not finite.
        candidates: entries that the list was cut down from to the top k; 0 where it is as it was packed.
        bits: the k-th largest magnitude, where the list was cut.
        splits: P - 1 indices that split the list into equal counts, where it is not empty.
        offsets: P + 1 integers, where each region begins in the list, if that is known.
        short: too few or too many candidates: the list was not cut, has no splits, and the host must look at it. Of a step that
            `launch` put on the stream too few alone, where it was to be cut to k and is not deferred.
    """

    nnz: int
    nonfinite: int
    candidates: int
    bits: int
    splits: list[int]
    offsets: list[int] | None = None
    short: bool = False


@dataclass(slots=True)
class Outcome:
    """How far a step came; equal on all ranks.

    Attributes:
        stopped_at: "" where the kernels apply the step; "selection" where nothing was exchanged; "threshold" where the lists of
            this rank's region have arrived, and nothing was kept; "sums" where a sum over the ranks is not finite.
        flagged: ranks whose gradients were not finite, where the step stopped for them.
        overflowed: the step stopped since a region got more than there is room for.
        skewed: it stopped at its threshold since one rank would keep far more than the others.
        nearest: sums that reach the nearest candidate, where the step stopped since none fits.
        bits, missed: the global threshold, and bits from the expected threshold to the nearest candidate; gathered: all that
            is applied; only where the step did not stop.
    """

    stopped_at: str
    flagged: tuple[int, ...] = ()
    overflowed: bool = False
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
        self._selection: DeviceSelection | None = None  # of the last step, once it was read
        self._pointers = (0, 0, 0)
        self._aborted = ""  # why no step can follow
        self._boundaries: NDArray[np.int64] | None = None
        # by the addresses of the vectors, the kind of gradient, and `deferred`; None: seen once. See `_first_graphs`
        self._graphs: dict[tuple[int, ...], dict[_Kind, Any] | None] = {}

    def fits(self, k: int) -> bool:
        """Whether windows and lists are as this k needs them; the same on all ranks."""
        return self._launches is not None and self._launches.k == k

    def prepare(self, k: int) -> None:
        """Lay everything out for a k. Collective: every rank must call.

        Raises:
            RuntimeError: a rank has no memory for it, or a step was aborted; on every rank alike.
        """
        if self._launches is not None and any(self._transport.allgather_objects(self._launches.aborted)):
            raise RuntimeError(_ABORTED.format("a rank did not finish its step"))
        self.close()
        self._launches = P2PGraph(self._kernels, self._transport, self._length, k, self._settings)

    def launch(
        self,
        gradient: Any,
        vectors: ErrorFeedback,
        bits: tuple[int, int],
        boundaries: NDArray[np.int64],
        selected: tuple[int, int] | None = None,
        exact: bool = False,
        timed: bool = False,
        cut_to_k: bool = False,
        deferred: bool = False,
    ) -> None:
        """Put one step on the stream. Collective: every rank must call; then `outcome`, and last `time_stages`.

        Args:
            gradient: [n], read; an array, or a tensor list, which may lie elsewhere in every step.
            vectors: of this rank. The residual becomes gradient + residual, less what is applied; the update becomes the
                sum over the ranks, scaled.
            bits: the local threshold, and the expected global one or the least that a sum must reach to be looked at.
            boundaries: int64[P + 1], equal on all ranks.
            selected: (nnz, nonfinite) when the selection lies in the buffer already, and nothing is to be accumulated.
            exact: compute the exact global threshold.
            timed: time the stages on the device, where the whole step runs there.
            cut_to_k: cut this rank's selection down to its top k wherever it holds as many, not only above the cap. Where it
                holds fewer, and the step is not deferred, all ranks stop at their selections.
            deferred: the host will not help. Where some rank's gradient or a sum is not finite the residual is as before, to
                rounding; and the threshold follows `choose_candidate` for a step that may not go exact. Equal on all ranks.

        Traffic: 2 words a selected entry outside the own region, read by its owner; 2(P-1) words a kept sum, read by all.
            Control: signals of P + 3, 66 and no words to every rank, or 4096 for 66 where the exact threshold is computed.
        """
        launches = self._launches
        assert launches is not None
        device = self._device
        self._epoch = self._selected_at = epoch = device.next_epoch()
        self._selection = None
        if boundaries is not self._boundaries:
            self._boundaries = boundaries
            if launches.set_regions(boundaries):
                self._graphs.clear()
        to_clear, support = 0, vectors.support
        if support is not None and (not support.nnz or support.entries.pointer == launches.gathered.pointer):  # type: ignore[attr-defined]
            to_clear = support.nnz
        else:
            vectors.clear_update()
        flags = (CUT_TO_K if cut_to_k else 0) | (DEFERRED if deferred else 0)
        launches.set_step(epoch, bits[0], bits[1], to_clear, flags)
        device.pending = True
        residual: Any = vectors.residual
        update: Any = vectors.update
        self._pointers = pointers = (
            pointer_of(gradient),
            residual.data.ptr,
            update.data.ptr,
        )
        stream = device.stream
        reader = launches.set_gradient(gradient)
        launches.timed = timed and selected is None
        if selected is not None:
            launches.upload_step(stream.ptr)
            launches.put_selection(*selected, stream.ptr)
        graphs = None
        if not timed:
            key = *pointers, reader, deferred
            graphs = self._graphs.get(key) or self._first_graphs(key)
        kind = _Kind(exact, selected is None)
        if graphs is not None and kind in graphs:
            graphs[kind].launch(stream)
        else:
            self._enqueue(pointers, stream.ptr, kind, deferred)

    def _enqueue(self, pointers: tuple[int, ...], stream: int, kind: _Kind, deferred: bool) -> None:
        """Put a step on a stream."""
        launches = self._launches
        assert launches is not None
        if kind.whole:
            launches.enqueue_whole(pointers, stream, exact=kind.exact, deferred=deferred)
        else:
            launches.enqueue(pointers, stream, exact=kind.exact, deferred=deferred)

    def _first_graphs(self, key: tuple[int, ...]) -> dict[_Kind, Any] | None:
        """Graphs by kind, for a key that comes a second time; None for one that may never come back.

        All are captured at once, so that no later step takes longer.
        """
        if key not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
            return None
        *pointers, _, deferred = key
        graphs = self._graphs[key] = {
            kind: self._captured(tuple(pointers), kind, bool(deferred)) for kind in _CAPTURED
        }
        return graphs

    def _captured(self, pointers: tuple[int, ...], kind: _Kind, deferred: bool) -> Any:
        capturing = self._device.capturing
        capturing.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            self._enqueue(pointers, capturing.ptr, kind, deferred)
        except BaseException:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # half a step is no graph
                capturing.end_capture()
            raise
        return capturing.end_capture()

    def selected(self) -> DeviceSelection:
        """The selection that `launch` made; waits for that alone, which comes long before the outcome."""
        if self._selection is None:
            assert self._launches is not None
            words = self._launches.selected.read(self._selected_at)
            after = 3 + self._transport.size
            offsets, (candidates, bits, *splits) = words[2:after], words[after:]
            short, nnz = divmod(words[0], 1 << SHORT_BIT)
            self._selection = DeviceSelection(nnz, words[1], candidates, bits, splits, offsets, bool(short))
        return self._selection

    def go_exact(self, lowest: int) -> Outcome:
        """Go on with a step that stopped since no candidate fits: compute the exact global threshold, and apply. Collective.

        Args:
            lowest: bits that a sum must reach to be looked at.

        Raises:
            RuntimeError: as `outcome`.

        Returns:
            As `outcome`; stopped again where fewer than k sums reach `lowest`, or one rank would keep far more than the others.

        Traffic: control: 4096 words to every rank.
        """
        launches, transport = self._launches, self._transport
        assert launches is not None
        epoch = self.upcoming_epoch()
        try:
            self._epoch = self._device.next_epoch()
            launches.set_step(self._epoch, 0, lowest, 0, 0)
            launches.enqueue_exact(self._pointers, self._device.stream.ptr)
        except BaseException:
            self.abort(epoch)
            raise
        self._device.pending = True
        others = transport.size - 1
        transport.traffic.count_control(WORD_BYTES * others * _DIGITS, len(LEVELS))
        decided = launches.decided.read(self._epoch)
        self._check_abort(decided[0], decided[DECISION_WORDS:])
        return self._kept(*decided, exact=True)

    def outcome(self, exact: bool) -> Outcome:
        """What the ranks decided, and the traffic counted; waits for that alone.

        Args:
            exact: as passed to `launch`.

        Raises:
            RuntimeError: a rank raised an error of its own, or did not come within `Settings.timeout`; on every rank, at the
                latest in its next step.
        """
        transport, launches = self._transport, self._launches
        assert launches is not None
        rank, ranks, traffic = transport.rank, transport.size, transport.traffic
        others = ranks - 1
        # while kernels run: what follows the wait keeps the GPU from its next step
        traffic.count_control(WORD_BYTES * others * (3 + ranks))
        selected = self.selected()
        offsets = selected.offsets or []
        messages = sum(other != rank and offsets[other] < offsets[other + 1] for other in range(ranks))
        nbytes = ENTRY.itemsize * (selected.nnz - offsets[rank + 1] + offsets[rank])
        counted, levels = (_DIGITS, len(LEVELS)) if exact else (NUM_COUNTERS, 1)
        decided = launches.decided.read(self._epoch)
        stop, counts = decided[0], decided[DECISION_WORDS:]
        self._check_abort(stop, counts)
        if stop in (BAD_SELECTION, NOT_FINITE, BAD_REGIONS):
            flags = counts if stop == NOT_FINITE else []
            flagged = tuple(source for source, found in enumerate(flags) if found)
            return Outcome("selection", flagged, overflowed=stop == BAD_REGIONS)
        traffic.count(nbytes, messages)
        traffic.count_control(WORD_BYTES * others * counted, levels)
        return self._kept(*decided, exact=exact)

    def _kept(self, stop: int, nearest: int, bits: int, total: int, *counts: int, exact: bool) -> Outcome:
        """What became of the sums, by the words of a decision."""
        assert self._launches is not None
        if stop:
            return Outcome("sums" if stop == BAD_SUMS else "threshold", skewed=stop == SKEWED, nearest=total)
        traffic, rank, others = self._transport.traffic, self._transport.rank, self._transport.size - 1
        traffic.count_control(0, 1)
        traffic.count(ENTRY.itemsize * others * counts[rank], others if counts[rank] else 0)
        missed = 0 if exact else _CANDIDATE_BITS[nearest]
        return Outcome("", bits=bits, missed=missed, gathered=self._launches.gathered[:total])

    def upcoming_epoch(self) -> int:
        """The epoch of what is launched next; raises RuntimeError where an earlier step was aborted."""
        if self._aborted:
            raise RuntimeError(self._aborted)
        return self._device.epoch + 1

    def abort(self, epoch: int) -> None:
        """Abort the step on all ranks from this epoch on, as this rank raises: their kernels would wait for its."""
        if self._launches is not None:
            self._aborted = _ABORTED.format(f"rank {self._transport.rank} raised an error of its own")
            # after a fault of the GPU this fails too, and the fault is the error to report
            with suppress(cupy.cuda.runtime.CUDARuntimeError):
                self._launches.abort(epoch)

    def check_abort(self) -> None:
        """Look for an abort that no step of this rank has met; waits for its kernels. Raises RuntimeError."""
        if self._launches is not None and not self._aborted and self._launches.aborted:
            self._aborted = _ABORTED.format("a rank did not finish its step")
        if self._aborted:
            raise RuntimeError(self._aborted)

    def _check_abort(self, stop: int, reasons: list[int]) -> None:
        if stop == ABORTED:
            self._aborted = _ABORTED.format(abort_reasons(reasons, self._settings.timeout))
            raise RuntimeError(self._aborted)

    def time_stages(self, timer: StageTimer) -> None:
        """Add the stages of a timed step, which is waited for; any other goes on on the stream."""
        assert self._launches is not None
        if self._launches.timed:
            self._device.synchronize()
            for stage, seconds in self._launches.stage_seconds():
                timer.add(stage, seconds)

    def select(self, gradient: Any, residual: Any, bits: int, exact: bool) -> DeviceSelection:
        """Accumulate and select what reaches `bits`, before a launch; waits.

        Args:
            gradient: [n], read.
            residual: float32[n]; becomes gradient + residual.
            exact: cut the list down to the top k.
        """
        launches = self._launches
        assert launches is not None
        launches.enqueue_selection(gradient, residual, bits, self._device.stream.ptr, exact=exact)
        self._device.synchronize()
        nnz, nonfinite = launches.packed_report[:2]
        splits = launches.splits[: self._transport.size - 1]
        if not exact:
            return DeviceSelection(nnz, nonfinite, 0, 0, splits)
        taken, _, candidates, short, threshold = launches.taken[:5]
        if short:
            return DeviceSelection(candidates, nonfinite, 0, 0, [], short=True)
        return DeviceSelection(taken, nonfinite, candidates, threshold, splits)

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
