"""The launches of a step over symmetric memory, laid out once for a k: buffers, windows, and all parameters that stay."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.kernels import tile_shift
from collectives.cuda.launch import Kernel, PreparedLaunch, compiled
from collectives.cuda.layouts import (
    COMPACT_THREADS,
    COMPACT_TILE,
    DECISION_WORDS,
    KEPT,
    NARROWEST,
    P2P,
    SELECTED,
    Decision,
    Step,
)
from collectives.device_transport import DeviceTransport
from collectives.symmetric_memory import SymmetricMemory, entries_bytes
from oktopk.cuda.kth_select import TAKEN_WORDS, KthSelect
from oktopk.cuda.layouts import APPLY_ENTRIES
from oktopk.cuda.mailbox import Mailbox
from oktopk.cuda.multi_tensor import GradientTensors, pointer_of
from oktopk.cuda.select import SelectLaunches, selection_header
from oktopk.settings import Settings, selection_cap
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


@dataclass(slots=True)
class _Reader:
    """The launches that read a gradient of one kind.

    Attributes:
        kernels: of that kind.
        alone, p2p: select from it, for this rank and for a step.
        undo: takes it out of the residual again, where a step stopped for elements that are not finite; None for one that stays.
    """

    kernels: Mapping[str, Kernel]
    alone: SelectLaunches
    p2p: SelectLaunches
    undo: PreparedLaunch | None


class P2PGraph:
    """Everything that a step launches.

    Args:
        kernels: the gradient kernels of this rank (`oktopk.cuda.kernels.DeviceKernels`).
        transport: of the ranks, which all use symmetric memory. Collective: every rank must construct.
        length: elements of the gradient (n).
        k: entries wanted.
        settings: equal on all ranks.

    Raises:
        ValueError: lists of this k do not fit 32-bit offsets; on every rank alike, before anything collective.
        RuntimeError: a rank has no memory for it, or another error; on every rank alike, naming the rank.

    Attributes:
        k: as given.
        pool: ENTRY[3k], the lists of this rank's region.
        gathered: ENTRY[5k/4], what was applied last.
        selected, decided: mailboxes of the selection and the decision.
        packed_report, collected, taken, splits: reports in pinned memory, as plain integers.
        timed: whether events are recorded between the stages of a step.

    Memory: a window of 13k/4 entries and 0.8 MB; lists of 29k/4 entries beside it; 2k entries and n/1500 words that a
        selection passes through; (P + 1)n/4096 words where tiles begin.
    """

    def __init__(
        self, kernels: Any, transport: DeviceTransport, length: int, k: int, settings: Settings
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
        self.pool = workspace.entries("incoming", pool)
        self.gathered = workspace.entries("gathered", selection_cap(k))
        self._sums = workspace.entries("region sums", pool)
        self.selected = Mailbox(device, "selected", 4 + 2 * ranks)
        self.decided = Mailbox(device, "decided", DECISION_WORDS + ranks)
        self.packed_report = device.view("select", ctypes.c_uint32 * (4 + ranks))
        self.collected = device.view("collected", ctypes.c_uint32 * ranks)
        self.taken = device.view("taken", ctypes.c_uint32 * TAKEN_WORDS)
        self.splits = device.view("splits found", ctypes.c_uint32 * ranks)
        self._step = device.view("step", Step)
        self._boundaries = device.allocate(ranks + 1, np.int64)

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
        self.timed = False
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
        self._select = kernels.select_launches(width, self._length, self._packed)
        self._reader = self._vector_reader = self._make_reader(kernels.kernels_for(width))
        self._tensor_reader: _Reader | None = None
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
            mine=self._packed.pointer, header=self._header,
        )  # fmt: skip
        device.synchronize()

    def _lay_out_sums(self, packed_at: int) -> None:
        """Takes memory for a region as long as the gradient."""
        device, ranks, p2p = self._device, self._transport.size, self._p2p
        lists: Any = self._transport.kernels
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
            p2p=p2p, packed_at=packed_at, cap=selection_cap(self.k), capacity=self.pool.size, pool=self.pool.pointer,
            splits=splits, report=device.address("collected"),
        )  # fmt: skip
        self._overflow_blocks = lists.overflow_blocks
        overflowed = device.scratch("p2p overflowed tiles", self._most_tiles, np.uint32).data.ptr
        self._count_sums = [
            kernel.prepare(
                p2p=p2p, pool=self.pool.pointer, splits=splits, lists=ranks, candidates=device.table(CANDIDATES),
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

    def _make_reader(self, kernels: Mapping[str, Kernel]) -> _Reader:
        alone = self._select.for_kernels(kernels)
        p2p = alone.for_p2p(
            p2p=self._p2p, boundaries=self._boundaries.data.ptr, regions=self._transport.size, header=self._header,
            mailbox=self.selected.address, k=self.k, cap=selection_cap(self.k), needs_no_trim=self._needs_no_trim,
        )  # fmt: skip
        kernel = kernels.get("undo_accumulate")
        undo = None
        if kernel is not None:
            undo = kernel.prepare(n=self._length, decision=self._p2p.decision)
        return _Reader(kernels, alone, p2p, undo)

    @property
    def aborted(self) -> bool:
        """Whether some rank has ended the waiting of this rank's kernels; waits for them."""
        return self._memory.aborted

    def abort(self, epoch: int) -> None:
        """End the waiting of all ranks' kernels from this epoch on. Not collective."""
        self._memory.abort(epoch)

    def set_step(self, epoch: int, local_bits: int, global_bits: int, support: int, flags: int) -> None:
        """Set what differs in the next step."""
        step = self._step
        step.epoch, step.local_bits, step.global_bits = epoch, local_bits, global_bits
        step.support, step.flags = support, flags

    def set_gradient(self, gradient: Any) -> int:
        """Use the launches that read a gradient of this kind; returns a number that differs from those of other kinds."""
        self._reader = self._vector_reader
        if isinstance(gradient, GradientTensors):
            if self._tensor_reader is None or self._tensor_reader.kernels is not gradient.kernels:
                self._tensor_reader = self._make_reader(gradient.kernels)
            self._reader = self._tensor_reader
        return int(self._reader.p2p.select.kernel.function)

    def set_regions(self, boundaries: NDArray[np.int64]) -> bool:
        """Set the regions; returns whether captured steps have too few blocks for them."""
        rank, step = self._transport.rank, self._step
        self._boundaries.set(boundaries, stream=self._device.stream)
        lower, upper = int(boundaries[rank]), int(boundaries[rank + 1])
        # where large entries lie close together a region is short, and so are its tiles: they get about as many entries
        shift = tile_shift(self.k, upper - lower)
        tiles = max(1, -(-(upper - lower) >> shift))
        step.lower, step.tiles, step.shift = lower, tiles, shift
        if tiles <= self._tiles:
            return False
        self._tiles = tiles
        return True

    def upload_step(self, stream: int) -> None:
        """Copy what `set_step` and `set_regions` set to the device."""
        host_to_device = cupy.cuda.runtime.memcpyHostToDevice
        source, nbytes = ctypes.addressof(self._step), ctypes.sizeof(self._step)
        cupy.cuda.runtime.memcpyAsync(self._p2p.step, source, nbytes, host_to_device, stream)

    def put_selection(self, nnz: int, nonfinite: int, stream: int) -> None:
        """Signal a selection that lies in the buffer."""
        params = self._put_selection.params
        params.nnz, params.nonfinite = nnz, nonfinite
        self._put_selection(1, 128, stream)

    def enqueue_whole(self, vectors: tuple[int, ...], stream: int, *, exact: bool, deferred: bool) -> None:
        """A step from the gradient on; can be captured. The arguments are those of `enqueue`."""
        self.upload_step(stream)
        self._mark(0, stream)
        self._reader.p2p.enqueue(vectors[0], vectors[1], stream)
        self._kth.trim(stream)
        self._mark(1, stream)
        self.enqueue(vectors, stream, exact=exact, deferred=deferred)

    def enqueue(self, vectors: tuple[int, ...], stream: int, *, exact: bool, deferred: bool) -> None:
        """What follows the selection; can be captured.

        Args:
            vectors: addresses of the gradient (for `set_gradient`'s kind), residual and update.
            exact: compute the exact global threshold.
            deferred: take the gradient out of the residual again where some rank's was not finite.
        """
        # here, since the selections of other ranks must be waited for anyway
        self._clear.params.vector = vectors[2]
        self._clear(self._clear_blocks, 256, stream)
        self._mark(2, stream)
        self._await(0, stream)
        self._collect(self._copy_blocks, 256, stream, self._transport.size)
        self._mark(3, stream)
        if exact:
            self._enqueue_exact_sums(stream)
        else:
            self._count_sums[0](self._tiles, 256, stream)
            self._count_sums[1](self._overflow_blocks, 256, stream)
            self._decide(1, 128, stream)
            self._keep_sums(self._keep_blocks, COMPACT_THREADS, stream)
        self._mark(4, stream)
        self._enqueue_apply(vectors, stream)
        if deferred and (undo := self._reader.undo) is not None:
            undo.params.gradient, undo.params.residual = vectors[:2]
            undo(self._undo_blocks, 256, stream)
        self._mark(5, stream)

    def enqueue_exact(self, vectors: tuple[int, ...], stream: int) -> None:
        """Finish a step that stopped at its threshold by the exact one; `vectors` are those of `enqueue`."""
        self.upload_step(stream)
        self._device.zero(self._p2p.decision, 4)  # why it stopped
        self._enqueue_exact_sums(stream)
        self._enqueue_apply(vectors, stream)

    def enqueue_selection(self, gradient: Any, residual: Any, bits: int, stream: int, *, exact: bool) -> None:
        """Accumulate, select what reaches `bits`, or of that the exact top k, and compute its equal-count splits."""
        self.set_gradient(gradient)
        self._reader.alone.run(pointer_of(gradient), residual.data.ptr, bits)
        if exact:
            self._kth.select_local(stream)
        else:
            self._kth.split(stream)

    def stage_seconds(self) -> list[tuple[str, float]]:
        """Seconds on the device by stage of the last timed step, which has ended."""
        elapsed = cupy.cuda.get_elapsed_time
        return [(name, elapsed(*self._marks[i : i + 2]) / 1e3) for i, name in enumerate(_STAGES)]

    def close(self) -> None:
        """Free the windows, and lists that another k may need far smaller. Collective."""
        self._memory.close()
        workspace: Any = self._transport.workspace
        workspace.forget("packed", "incoming", "gathered", "region sums")

    def _enqueue_exact_sums(self, stream: int) -> None:
        self._sum_all[0](self._tiles, 256, stream)
        self._sum_all[1](self._overflow_blocks, 256, stream)
        self._kth.select_global(stream)
        self._put_kept(1, 128, stream)

    def _await(self, signal: int, stream: int) -> None:
        if self._device.priority < 0:
            self._awaits[signal](1, 128, stream)

    def _enqueue_apply(self, vectors: tuple[int, ...], stream: int) -> None:
        self._await(1, stream)
        params = self._apply.params
        _, params.residual, params.update = vectors
        self._apply(self._apply_blocks, 256, stream, self._transport.size)

    def _mark(self, number: int, stream: int) -> None:
        if self.timed:
            cupy.cuda.runtime.eventRecord(self._marks[number].ptr, stream)
