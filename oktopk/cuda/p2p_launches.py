"""The launches of a step among the GPUs of one host, laid out once for a k: buffers, windows, and all parameters that stay.

The kernels exchange selections and counts through symmetric memory, and decide alike on all ranks; no kernel waits for the host.
They cut a selection over the cap down to the top k. What they cannot end stops at the same place on all ranks, see `p2p_outcome`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.kernels import tile_shift
from collectives.cuda.launch import Kernel, compiled
from collectives.cuda.layouts import (
    COMPACT_THREADS,
    COMPACT_TILE,
    DECISION_WORDS,
    DEFERRED,
    KEPT,
    NARROWEST,
    ODD,
    P2P,
    SELECTED,
    Decision,
    Step,
)
from collectives.device_transport import DeviceTransport
from collectives.split_and_reduce import RegionLists
from collectives.symmetric_memory import SymmetricMemory, abort_reasons, entries_bytes
from oktopk.cuda.kth_select import KthSelect
from oktopk.cuda.layouts import APPLY_ENTRIES
from oktopk.cuda.mailbox import Mailbox
from oktopk.cuda.multi_tensor import GradientTensors, pointer_of
from oktopk.cuda.select import selection_header
from oktopk.cuda.step_graphs import StepGraphs
from oktopk.error_feedback import ErrorFeedback
from oktopk.results import StageTimer
from oktopk.settings import Settings, selection_cap
from oktopk.step import Gradient
from oktopk.thresholds import CANDIDATES, MISS

_KERNELS = Path(__file__).parent
_POOL = 3  # a region's incoming entries, in multiples of k: regions balance
_OFFSETS = 2**32  # kernels count and index entries in 32 bits
_SMALL_POOL = 4096  # entries that cost nothing: a small k may lie in one region on every rank
_ROOM = 1.5  # a region may have so many times the tiles of an equal one before graphs are captured anew
_STAGES = ("select", "clear", "exchange", "reduce", "gather and apply")


def compile_p2p_kernels() -> None:
    """Compile what steps over symmetric memory alone use, while a failure can still be sent to the other ranks."""
    for file, kernel in (("decide.cu", "decide"), ("kth.cu", "kth_histogram")):
        compiled(_KERNELS / file).get_function(kernel)


class P2PLaunches:
    """Everything that a step launches, and the graphs that it is captured in.

    Args:
        kernels: the gradient kernels of this rank (`oktopk.cuda.kernels.DeviceKernels`).
        transport: of the ranks, which all use symmetric memory. Collective: every rank must construct.
        length: elements of the gradient (n).
        settings: equal on all ranks.
        k: entries wanted.

    Raises:
        ValueError: lists of this k do not fit 32-bit offsets; on every rank alike, before anything collective.
        RuntimeError: a rank has no memory for it, or another error; on every rank alike, naming the rank.

    Attributes:
        k: as given.
        gathered: ENTRY[5k/4], what was applied last.
        selected, decided: mailboxes of the selection and the decision.

    Memory: a window of 13k/4 entries and 0.8 MB; lists of 29k/4 entries beside it; 2k entries and n/1500 words that a
        selection passes through; (P + 1)n/4096 words where tiles begin.
    """

    def __init__(
        self, kernels: Any, transport: DeviceTransport, length: int, settings: Settings, k: int
    ) -> None:
        most = max(_POOL * k, transport.size * selection_cap(k))
        if most >= _OFFSETS:
            raise ValueError(
                f"k = {k} on {transport.size} ranks: lists of up to {most} entries do not fit 32-bit offsets (< {_OFFSETS})"
            )
        self.k = k
        self._kernels, self._transport, self._length = kernels, transport, length
        self._device = transport.device
        packed_at = SymmetricMemory.first
        kept_at = packed_at + entries_bytes(2 * k)
        kept = selection_cap(k) + 1
        self._memory = SymmetricMemory(transport, self._device, kept_at + entries_bytes(kept))
        self._packed = self._memory.entries(packed_at, 2 * k)
        self._kept = self._memory.entries(kept_at, kept)
        try:  # without agreement the other GPUs would wait for this rank
            with transport.together_or("steps over symmetric memory cannot be laid out", RuntimeError):
                self._make_buffers(settings.timeout)
                self._lay_out(packed_at, kept_at, settings)
        except RuntimeError:
            self.close()
            raise

    def _make_buffers(self, timeout: float) -> None:
        device, ranks, k = self._device, self._transport.size, self.k
        workspace: Any = self._transport.workspace
        workspace.set_buffer("packed", self._packed)
        pool = max(_POOL * k, min(ranks * selection_cap(k), _SMALL_POOL))
        self._pool = workspace.entries("incoming", pool)
        self.gathered = workspace.entries("gathered", selection_cap(k))
        self._sums = workspace.entries("region sums", pool)
        self.selected = Mailbox(device, "selected", 4 + 2 * ranks)
        self.decided = Mailbox(device, "decided", DECISION_WORDS + ranks)
        self._collected = device.view("collected", ctypes.c_uint32 * ranks)
        self._step = device.view("step", Step)
        self._boundaries = device.allocate(ranks + 1, np.int64)
        self._regions: NDArray[np.int64] | None = None  # of the last launch
        self._vectors = (0, 0, 0)  # addresses of its gradient, residual and update
        self._graphs = StepGraphs(device)
        self._odd = 0  # flag of the last launch

        def words(name: str, nbytes: int) -> int:
            return int(device.scratch(name, nbytes // 4, np.uint32).data.ptr)

        self._p2p = P2P(
            windows=self._memory.windows,
            ranks=ranks,
            rank=self._transport.rank,
            step=words("step", ctypes.sizeof(Step)),
            decision=words("decision", ctypes.sizeof(Decision)),
            timeout=int(1e9 * timeout),
        )
        self._needs_no_trim = words("needs no trim", 4)
        self._header = selection_header(device, ranks)
        self._timed = False
        with device.gpu:
            self._marks = [cupy.cuda.Event() for _ in range(len(_STAGES) + 1)]

    def _lay_out(self, packed_at: int, kept_at: int, settings: Settings) -> None:
        device, kernels = self._device, self._kernels
        ranks, k, cap = self._transport.size, self.k, selection_cap(self.k)
        equal = -(-self._length // ranks)
        self._most_tiles = max(1, -(-self._length >> NARROWEST))
        self._tiles = min(self._most_tiles, int(_ROOM * max(1, -(-equal >> tile_shift(k, equal)))))
        # enough to cover NVLink's latency, few enough to wait side by side
        self._copy_blocks = max(1, min(8 * device.processors // ranks, -(-2 * k // (256 * ranks))))
        # a warp for each part of the most that a rank keeps, so that all take about as long
        self._apply_blocks = max(1, -(-cap // (ranks * APPLY_ENTRIES * 8)))
        self._clear_blocks = max(1, min(16 * device.processors, -(-cap // 256)))
        # few: nearly always they have nothing to do
        self._undo_blocks = device.processors
        width = kernels.gradient_bytes
        select = kernels.select_launches(width, self._length, self._packed)
        self._reader = self._vector_reader = select.for_p2p(
            kernels.kernels_for(width)["undo_accumulate"],
            p2p=self._p2p, boundaries=self._boundaries.data.ptr, regions=ranks, header=self._header,
            mailbox=self.selected.address, k=k, cap=cap, needs_no_trim=self._needs_no_trim,
        )  # fmt: skip
        self._kth = KthSelect(
            self._transport, self._p2p, k, settings.balance_trigger,
            header=self._header, packed=self._packed, sums=self._sums, kept=self._kept,
            boundaries=self._boundaries.data.ptr, needs_no_trim=self._needs_no_trim, selected=self.selected.address,
            decided=self.decided.address,
        )  # fmt: skip
        self._lay_out_sums(packed_at)
        self._decide = Kernel(compiled(_KERNELS / "decide.cu"), "decide").prepare(
            p2p=self._p2p, candidates=device.table(CANDIDATES), k=k, cap=cap, tolerance=settings.drift_tolerance, miss=MISS,
            trigger=settings.balance_trigger, mailbox=self.decided.address,
        )  # fmt: skip
        self._clear = kernels.clear_kernel.prepare(entries=self.gathered.pointer, step=self._p2p.step)
        self._apply = Kernel(compiled(_KERNELS / "apply.cu"), "gather_and_apply").prepare(
            p2p=self._p2p, kept_at=kept_at, gathered=self.gathered.pointer, scale=1.0 / ranks if settings.average else 1.0,
            selected=self._packed.pointer, header=self._header,
        )  # fmt: skip
        device.synchronize()

    def _lay_out_sums(self, packed_at: int) -> None:
        """Takes memory for a region as long as the gradient."""
        device, ranks, p2p = self._device, self._transport.size, self._p2p
        lists = self._transport.kernels
        splits = device.scratch("p2p splits", ranks * (self._most_tiles + 1), np.uint32).data.ptr
        collect = lists.collect_kernels()
        self._put_selection = collect["put_selection"].prepare(
            p2p=p2p, entries=self._packed.pointer, boundaries=self._boundaries.data.ptr, header=self._header,
            mailbox=self.selected.address,
        )  # fmt: skip
        self._put_kept = collect["put_kept"].prepare(p2p=p2p)
        # beside computation no grid may wait for other GPUs: those may wait for what it keeps from this one
        self._awaits = [
            collect["await_signal"].prepare(p2p=p2p, signal=signal) for signal in (SELECTED, KEPT)
        ]
        self._collect = collect["collect_region"].prepare(
            p2p=p2p, packed_at=packed_at, cap=selection_cap(self.k), capacity=self._pool.size, pool=self._pool.pointer,
            splits=splits, report=device.address("collected"),
        )  # fmt: skip
        self._overflow_blocks = lists.overflow_blocks
        overflowed = device.scratch("p2p overflowed tiles", self._most_tiles, np.uint32).data.ptr
        self._count_sums = [
            kernel.prepare(
                p2p=p2p, pool=self._pool.pointer, splits=splits, lists=ranks, candidates=device.table(CANDIDATES),
                sums=self._sums.pointer, overflowed=overflowed, state=lists.sums_state,
            )
            for kernel in lists.sum_kernels
        ]  # fmt: skip
        alone = P2P.from_buffer_copy(p2p)
        alone.windows = 0  # sums below the threshold become zero, and nothing is counted or signalled
        self._sum_all = [launch.copy(p2p=alone, candidates=0) for launch in self._count_sums]
        self._keep_blocks = -(-self._sums.size // COMPACT_TILE)
        self._keep_sums = lists.keep_kernel.prepare(
            p2p=p2p, sums=self._sums.pointer, kept=self._kept.pointer, capacity=self._kept.size, state=lists.sums_state,
            scan=device.scan("p2p keep", self._keep_blocks),
        )  # fmt: skip

    @property
    def aborted(self) -> bool:
        """Whether some rank has ended the waiting of this rank's kernels; waits for them."""
        return self._memory.aborted

    def abort(self, epoch: int) -> None:
        """End the waiting of all ranks' kernels from this epoch on. Not collective."""
        # after a fault of the GPU this fails too, and the fault is the error to report
        with suppress(cupy.cuda.runtime.CUDARuntimeError):
            self._memory.abort(epoch)

    def why_aborted(self, reasons: Sequence[int]) -> str:
        """What an outcome's reasons say, in words."""
        return abort_reasons(list(reasons), self._p2p.timeout / 1e9)

    def launch(
        self,
        gradient: Gradient,
        vectors: ErrorFeedback,
        boundaries: NDArray[np.int64],
        bits: tuple[int, int],
        flags: int,
        *,
        exact: bool,
        timed: bool = False,
        selected: int | None = None,
    ) -> int:
        """Put a step on the stream. Collective: every rank must call.

        Args:
            gradient: [n], read; an array, or a tensor list, which may lie elsewhere in every step.
            vectors: of this rank. The residual becomes gradient + residual, less what is applied; the update becomes the
                sum over the ranks, scaled.
            boundaries: int64[P + 1], equal on all ranks; another array where they have changed.
            bits: the local threshold, and the expected global one or the least that a sum must reach to be looked at.
            flags: CUT_TO_K, DEFERRED and FLAGGED, see `collectives.cuda.layouts`.
            exact: compute the exact global threshold.
            timed: time the stages on the device.
            selected: entries of the selection, where it lies in the buffer already and nothing is to be accumulated.

        Returns:
            The epoch of what it will report to `selected` and `decided`.

        Traffic: 2 words a selected entry outside the own region, read by its owner; 2(P-1) words a kept sum, read by all.
            Control: signals of P + 3, 66 and no words to every rank, or 4096 for 66 where the exact threshold is computed.
        """
        device, stream = self._device, self._device.stream
        if boundaries is not self._regions:
            self._set_regions(boundaries)
        support, to_clear = vectors.support, 0
        if support is not None and (not support.nnz or support.entries.pointer == self.gathered.pointer):  # type: ignore[attr-defined]
            to_clear = support.nnz
        else:
            vectors.clear_update()
        self._odd ^= ODD
        epoch = self._set_step(*bits, to_clear, flags | self._odd)
        deferred, residual, update = bool(flags & DEFERRED), vectors.residual, vectors.update
        self._vectors = addresses = pointer_of(gradient), pointer_of(residual), pointer_of(update)
        self._reader = self._vector_reader
        if isinstance(gradient, GradientTensors):
            self._reader = self._reader.for_kernels(gradient.kernels)
        self._timed = timed and selected is None
        if selected is not None:
            self._upload_step(stream.ptr)
            self._put_selection.params.nnz = selected
            self._put_selection(1, 128, stream.ptr)
            self._enqueue(addresses, stream.ptr, exact, deferred)
        elif timed:
            self._enqueue_whole(addresses, stream.ptr, exact, deferred)
        else:
            key = *addresses, self._reader.select.kernel.function, deferred
            self._graphs.launch(
                key, exact, lambda at, exact: self._enqueue_whole(addresses, at, exact, deferred)
            )
        device.pending = True
        return epoch

    def launch_exact(self, lowest: int) -> int:
        """Go on with a step that stopped for its threshold: compute the exact one, and apply. Collective; returns the epoch.

        Args:
            lowest: bits that a sum must reach to be looked at.

        Traffic: control: 4096 words to every rank.
        """
        stream = self._device.stream.ptr
        epoch = self._set_step(0, lowest, 0, 0)
        self._upload_step(stream)
        self._device.zero(self._p2p.decision, 4)  # why it stopped
        self._enqueue_exact_sums(stream)
        self._enqueue_apply(self._vectors, stream)
        self._device.pending = True
        return epoch

    def lists(self) -> RegionLists:
        """The contributions to this rank's region, after a step that stopped for its threshold."""
        assert self._regions is not None
        self._device.synchronize()
        rank, ranks = self._transport.rank, self._transport.size
        incoming = self._collected[:ranks]
        counts = np.array([incoming[(rank - i) % ranks] for i in range(ranks)], np.int64)
        ends = counts.cumsum()
        lower, upper = (int(edge) for edge in self._regions[rank : rank + 2])
        return RegionLists(self._pool, ends - counts, ends, lower, upper, self._transport)

    def time_stages(self, timer: StageTimer) -> None:
        """Add the stages of a timed step, which is waited for; any other goes on on the stream."""
        if self._timed:
            self._device.synchronize()
            for at, stage in enumerate(_STAGES):
                timer.add(stage, cupy.cuda.get_elapsed_time(*self._marks[at : at + 2]) / 1e3)

    def close(self) -> None:
        """Free the windows, and lists that another k may need far smaller. Collective."""
        self._memory.close()
        workspace: Any = self._transport.workspace
        workspace.forget("packed", "incoming", "gathered", "region sums")

    def _set_step(self, local_bits: int, global_bits: int, support: int, flags: int) -> int:
        """Set what differs in the next launch; returns its epoch."""
        step = self._step
        step.epoch, step.local_bits, step.global_bits = self._device.next_epoch(), local_bits, global_bits
        step.support, step.flags = support, flags
        return int(step.epoch)

    def _set_regions(self, boundaries: NDArray[np.int64]) -> None:
        rank, step = self._transport.rank, self._step
        self._regions = boundaries
        self._boundaries.set(boundaries, stream=self._device.stream)
        lower, upper = int(boundaries[rank]), int(boundaries[rank + 1])
        # where large entries lie close together a region is short, and so are its tiles: they get about as many entries
        shift = tile_shift(self.k, upper - lower)
        tiles = max(1, -(-(upper - lower) >> shift))
        step.lower, step.tiles, step.shift = lower, tiles, shift
        if tiles > self._tiles:  # captured steps have too few blocks
            self._tiles = tiles
            self._graphs.clear()

    def _upload_step(self, stream: int) -> None:
        host_to_device = cupy.cuda.runtime.memcpyHostToDevice
        source, nbytes = ctypes.addressof(self._step), ctypes.sizeof(self._step)
        cupy.cuda.runtime.memcpyAsync(self._p2p.step, source, nbytes, host_to_device, stream)

    def _enqueue_whole(self, vectors: tuple[int, ...], stream: int, exact: bool, deferred: bool) -> None:
        """A step from the gradient on; can be captured. The arguments are those of `_enqueue`."""
        self._upload_step(stream)
        self._mark(0, stream)
        self._reader.enqueue(vectors[0], vectors[1], stream)
        self._kth.trim(stream)
        self._mark(1, stream)
        self._enqueue(vectors, stream, exact, deferred)

    def _enqueue(self, vectors: tuple[int, ...], stream: int, exact: bool, deferred: bool) -> None:
        """What follows the selection; can be captured. Beside each launch is its kernel; p2p.cuh has the signals.

        Args:
            vectors: addresses of the gradient (of `_reader`'s kind), residual and update.
            exact: compute the exact global threshold.
            deferred: take the gradient out of the residual again where some rank's was not finite.
        """
        # here, since the selections of other ranks must be waited for anyway
        self._clear.params.vector = vectors[2]
        self._clear(self._clear_blocks, 256, stream)  # apply.cu: clear_support
        self._mark(2, stream)
        self._await(0, stream)
        self._collect(self._copy_blocks, 256, stream, self._transport.size)  # collect.cu: collect_region
        self._mark(3, stream)
        if exact:
            self._enqueue_exact_sums(stream)
        else:
            self._count_sums[0](self._tiles, 256, stream)  # sum_sorted_lists.cu: sum_tiles
            self._count_sums[1](self._overflow_blocks, 256, stream)  # and sum_overflowed_tiles
            self._decide(1, 128, stream)  # decide.cu
            self._keep_sums(self._keep_blocks, COMPACT_THREADS, stream)  # which signals KEPT
        self._mark(4, stream)
        self._enqueue_apply(vectors, stream)
        if deferred and (undo := self._reader.undo) is not None:
            undo.params.gradient, undo.params.residual = vectors[:2]
            undo(self._undo_blocks, 256, stream)
        self._mark(5, stream)

    def _enqueue_exact_sums(self, stream: int) -> None:
        self._sum_all[0](self._tiles, 256, stream)  # sum_sorted_lists.cu: sum_tiles
        self._sum_all[1](self._overflow_blocks, 256, stream)  # and sum_overflowed_tiles
        self._kth.select_global(stream)  # kth.cu: kth_histogram to take_exact
        self._put_kept(1, 128, stream)  # collect.cu; signals KEPT

    def _await(self, signal: int, stream: int) -> None:
        if self._device.priority < 0:
            self._awaits[signal](1, 128, stream)

    def _enqueue_apply(self, vectors: tuple[int, ...], stream: int) -> None:
        self._await(1, stream)
        params = self._apply.params
        _, params.residual, params.update = vectors
        self._apply(self._apply_blocks, 256, stream, self._transport.size)  # apply.cu: gather_and_apply

    def _mark(self, number: int, stream: int) -> None:
        if self._timed:
            cupy.cuda.runtime.eventRecord(self._marks[number].ptr, stream)
