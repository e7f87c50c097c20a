"""The launches of a step among peers, laid out once for a k: buffers, windows, and every argument that stays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.environment import is_cuda_error
from collectives.cuda.kernels import COMPACT_TILE, NARROWEST, tile_shift
from collectives.cuda.launch import Kernel, PreparedLaunch, compiled, double_bits, float_bits
from collectives.mpi_cuda import CudaMpiTransport
from collectives.symmetric_memory import SymmetricMemory, entries_bytes
from oktopk.cuda.kth_select import TAKEN_WORDS, KthSelect
from oktopk.cuda.mailbox import Mailbox, report
from oktopk.cuda.multi_tensor import GradientTensors, pointer_of
from oktopk.cuda.select import SelectLaunches
from oktopk.settings import Settings, selection_cap
from oktopk.thresholds import CANDIDATES, MISS

if TYPE_CHECKING:
    from oktopk.cuda.kernels import DeviceKernels

_COUNTS = 5  # words of a decision before the counts: see peer.cuh
_KERNELS = Path(__file__).parent
_POOL = 3  # a region's incoming entries, in multiples of k: regions balance
_SMALL_POOL = 4096  # entries that cost nothing: a small k may lie in one region on every rank
_ROOM = 1.5  # a region may have so many times the tiles of an equal one before graphs are captured anew
_PIECE = 128  # entries that a warp of gather_and_apply takes at once
_STEP_WORDS = 8  # of a step: see peer.cuh
_STAGES = ("select", "clear", "exchange", "reduce", "gather and apply")


def compile_peer_kernels() -> None:
    """Compile what steps among peers alone use, where a failure can still be told to the other ranks."""
    for file, kernel in (("decide.cu", "decide"), ("kth.cu", "kth_histogram")):
        compiled(_KERNELS / file).get_function(kernel)


@dataclass(slots=True)
class _Reading:
    """The launches that read a gradient of one kind.

    Attributes:
        kernels: of that kind.
        alone, among_peers: select from it, for this rank and for a step.
        undo: takes it out of the residual again, where a step stopped for what is not finite.
    """

    kernels: Mapping[str, Kernel]
    alone: SelectLaunches
    among_peers: SelectLaunches
    undo: PreparedLaunch


class P2PGraph:
    """Everything that a step launches.

    Args:
        kernels: of this rank's gradients.
        transport: of the ranks, which all use peer memory. Collective: every rank must construct.
        length: elements of the gradient (n).
        k: entries wanted.
        settings: equal on all ranks.

    Raises:
        RuntimeError: a rank has no memory for it; on every rank alike.

    Attributes:
        pool: ENTRY[3k], what this rank's region got.
        gathered: ENTRY[5k/4], what was applied last.
        selected, decided: what kernels announce; packed_report, collected, taken, cuts: what they report, in pinned memory.
        timed: whether events are recorded between the stages of a step.

    Memory: a window of 13k/4 entries and 0.8 MB; lists of 29k/4 entries beside it; 2k entries and n/1500 words that a
        selection passes through; (P + 1)n/4096 words where tiles begin.
    """

    def __init__(
        self, kernels: DeviceKernels, transport: CudaMpiTransport, length: int, k: int, settings: Settings
    ) -> None:
        self.k = k
        self._kernels, self._transport, self._length = kernels, transport, length
        self._device = transport.device
        packed_at = SymmetricMemory.first + -SymmetricMemory.first % 256
        kept_at = packed_at + entries_bytes(2 * k)
        kept = selection_cap(k) + 1
        self._memory = SymmetricMemory(transport, self._device, kept_at + entries_bytes(kept))
        self._packed = self._memory.entries(packed_at, 2 * k)
        self._kept = self._memory.entries(kept_at, kept)
        problem = ""
        try:
            self._make_buffers()
            self._lay_out(packed_at, kept_at, settings)
        except Exception as error:
            if not isinstance(error, MemoryError) and not is_cuda_error(error):
                raise
            problem = str(error) or type(error).__name__
        # the others would wait for this rank on their GPUs, where nothing ends them
        problems = transport.allgather_objects(problem)
        if any(problems):
            self._memory.close()
            named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
            raise RuntimeError(f"no memory for steps among peers: {named}")

    def _make_buffers(self) -> None:
        device, ranks, k = self._device, self._transport.size, self.k
        workspace: Any = self._transport.workspace
        workspace.set_buffer("packed", self._packed)
        pool = max(_POOL * k, min(ranks * selection_cap(k), _SMALL_POOL))
        self.pool = workspace.entries("incoming", pool)
        self.gathered = workspace.entries("gathered", selection_cap(k))
        self._sums = workspace.entries("region sums", pool)
        self.selected = Mailbox(device, "told", 4 + 2 * ranks)
        self.packed_report = report(device, "select", 4 + ranks)
        self.collected = report(device, "collected", ranks)
        self.decided = Mailbox(device, "decided", _COUNTS + ranks)
        self.taken = report(device, "taken", TAKEN_WORDS)
        self.cuts = report(device, "cuts found", ranks)
        self._words = report(device, "step", _STEP_WORDS)
        self._where = device.allocate(ranks + 1, np.int64)
        self._decision = device.scratch("decision", _COUNTS + 2 * ranks, np.uint32).data.ptr
        self._settled = device.scratch("selection settled", 1, np.uint32).data.ptr
        self._step = device.scratch("step", _STEP_WORDS, np.uint32).data.ptr
        self._header = self._kernels.header(ranks)
        self.timed = False
        self._marks = [cupy.cuda.Event() for _ in range(len(_STAGES) + 1)]

    def _lay_out(self, packed_at: int, kept_at: int, settings: Settings) -> None:
        device, transport, kernels = self._device, self._transport, self._kernels
        ranks, k, windows = transport.size, self.k, self._memory.windows
        equal = -(-self._length // ranks)
        self._most_tiles = max(1, -(-self._length >> NARROWEST))
        self._tiles = min(self._most_tiles, int(_ROOM * max(1, -(-equal >> tile_shift(k, equal)))))
        # enough to keep NVLink's latency covered, few enough to wait side by side
        self._copy_blocks = max(1, min(8 * device.processors // ranks, -(-2 * k // (256 * ranks))))
        # a warp for each piece of what a rank keeps at most, so that all take about as long
        self._apply_blocks = max(1, -(-selection_cap(k) // (ranks * _PIECE * 8)))
        self._clear_blocks = max(1, min(16 * device.processors, -(-selection_cap(k) // 256)))
        # few: nearly always they have nothing to do
        self._undo_blocks = device.processors
        # momentum correction selects from a velocity, which is float32
        width = 4 if settings.momentum_correction else kernels.gradient_bytes
        self._select = kernels.select_launches(width, self._length, self._packed)
        self._reading = self._one_vector = self._lay_out_reading(kernels.kernels_for(width))
        self._pieces: _Reading | None = None
        scale = 1.0 / ranks if settings.average else 1.0
        self._lay_out_exchange(packed_at, kept_at, settings.drift_tolerance, settings.balance_trigger, scale)
        self._naming = KthSelect(
            transport,
            k,
            settings.balance_trigger,
            header=self._header,
            packed=self._packed,
            sums=self._sums,
            kept=self._kept,
            where=self._where.data.ptr,
            settled=self._settled,
            windows=windows,
            decision=self._decision,
            step=self._step,
        )
        self._lay_out_sums()
        device.synchronize()

    def set_step(self, epoch: int, local_bits: int, global_bits: int, support: int, ways: int) -> None:
        """Say what is different about the next step."""
        words = self._words
        words[0], words[1], words[2], words[3], words[7] = epoch, local_bits, global_bits, support, ways

    def read(self, gradient: Any) -> int:
        """Lay out for a gradient of this kind what is enqueued next; returns what tells such launches from others."""
        self._reading = self._one_vector
        if isinstance(gradient, GradientTensors):
            if self._pieces is None or self._pieces.kernels is not gradient.kernels:
                self._pieces = self._lay_out_reading(gradient.kernels)
            self._reading = self._pieces
        return int(self._reading.undo.kernel.function)

    def set_regions(self, boundaries: NDArray[np.int64]) -> bool:
        """Say where the new regions lie; whether graphs of a step have too few blocks for them."""
        rank = self._transport.rank
        self._where.set(boundaries, stream=self._device.stream)
        lower, upper = int(boundaries[rank]), int(boundaries[rank + 1])
        # where large entries lie close together a region is short, and so are its tiles: they get about as many entries
        shift = tile_shift(self.k, upper - lower)
        tiles = max(1, -(-(upper - lower) >> shift))
        self._words[4], self._words[5], self._words[6] = lower, tiles, shift
        if tiles <= self._tiles:
            return False
        self._tiles = tiles
        return True

    def upload_step(self, stream: int) -> None:
        """Put what `set_step` and `set_regions` said where kernels read it."""
        host_to_device = cupy.cuda.runtime.memcpyHostToDevice
        source = ctypes.addressof(self._words)
        cupy.cuda.runtime.memcpyAsync(self._step, source, 4 * _STEP_WORDS, host_to_device, stream)

    def tell(self, nnz: int, nonfinite: int, stream: int) -> None:
        """Tell the peers of a selection that lies in the buffer."""
        values = self._tell_selection.values
        values[1], values[2] = nnz, nonfinite
        self._tell_selection(1, 128, stream)

    def enqueue_whole(self, vectors: tuple[int, ...], stream: int, *, exact: bool, unaided: bool) -> None:
        """A step from the gradient on; one that is not exact can be captured. The arguments are those of `enqueue`."""
        self.upload_step(stream)
        self._mark(0, stream)
        self._reading.among_peers.enqueue(vectors[0], vectors[1], stream)
        self._naming.tighten(stream)
        self._mark(1, stream)
        self.enqueue(vectors, stream, exact=exact, unaided=unaided)

    def enqueue(self, vectors: tuple[int, ...], stream: int, *, exact: bool, unaided: bool) -> None:
        """What follows the selection: (gradient, residual, update, velocity or 0) are addresses, the first one as `read` has it.

        Where the step is unaided, the gradient leaves the residual again where some rank's was not finite.
        """
        ranks = self._transport.size
        # here, since the selections of other ranks must be waited for anyway
        self._clear.values[0] = vectors[2]
        self._clear(self._clear_blocks, 256, stream)
        self._mark(2, stream)
        self._collect(self._copy_blocks, 256, stream, ranks)
        self._mark(3, stream)
        if exact:
            self._enqueue_named_sums(stream)
        else:
            self._count_sums[0](self._tiles, 256, stream)
            self._count_sums[1](self._crowded_blocks, 256, stream)
            self._decide(1, 128, stream)
            self._keep_sums(self._keep_blocks, 256, stream)
        self._mark(4, stream)
        self._enqueue_apply(vectors, stream)
        if unaided:
            undo = self._reading.undo
            undo.values[0], undo.values[1] = vectors[0], vectors[1]
            undo(self._undo_blocks, 256, stream)
        self._mark(5, stream)

    def enqueue_naming(self, vectors: tuple[int, ...], stream: int) -> None:
        """What follows the sums of a step that stopped at its threshold, by the exact one; `vectors` are those of `enqueue`."""
        self.upload_step(stream)
        self._device.zero(self._decision, 4)  # why it stopped
        self._enqueue_named_sums(stream)
        self._enqueue_apply(vectors, stream)

    def enqueue_exact_selection(self, gradient: Any, residual: Any, lowest: int, stream: int) -> None:
        """Accumulate, and cut what reaches `lowest` down to the exact top k."""
        self._select_alone(gradient, residual, lowest)
        self._naming.name_locally(2 * self.k, stream)

    def enqueue_selection(self, gradient: Any, residual: Any, bits: int, stream: int) -> None:
        """Accumulate, select what reaches `bits`, and find where that splits evenly."""
        self._select_alone(gradient, residual, bits)
        self._naming.cut(stream)

    def stage_seconds(self) -> list[tuple[str, float]]:
        """Seconds on the device by stage of the last timed step, which has ended."""
        elapsed = cupy.cuda.get_elapsed_time
        return [(name, elapsed(*self._marks[i : i + 2]) / 1e3) for i, name in enumerate(_STAGES)]

    def close(self) -> None:
        """Free the windows, and lists that another k may need far smaller. Collective."""
        self._memory.close()
        workspace: Any = self._transport.workspace
        workspace.forget("packed", "incoming", "gathered", "region sums")

    def _enqueue_named_sums(self, stream: int) -> None:
        self._sum_all[0](self._tiles, 256, stream)
        self._sum_all[1](self._crowded_blocks, 256, stream)
        self._naming.name_globally(self.pool.size, stream)
        self._tell_kept(1, 128, stream)

    def _enqueue_apply(self, vectors: tuple[int, ...], stream: int) -> None:
        values = self._apply.values
        values[6], values[10], values[11] = vectors[2], vectors[1], vectors[3]
        self._apply(self._apply_blocks, 256, stream, self._transport.size)

    def _select_alone(self, gradient: Any, residual: Any, bits: int) -> None:
        self.read(gradient)
        self._reading.alone(pointer_of(gradient), residual.data.ptr, bits, None)

    def _mark(self, number: int, stream: int) -> None:
        if self.timed:
            cupy.cuda.runtime.eventRecord(self._marks[number].ptr, stream)

    def _lay_out_reading(self, kernels: Mapping[str, Kernel]) -> _Reading:
        alone = self._select.reading(kernels)
        among_peers = alone.among_peers(
            self._memory.windows,
            self._transport.size,
            self._transport.rank,
            self._where.data.ptr,
            self.k,
            self._settled,
            self._step,
        )
        undo = PreparedLaunch(kernels["undo_accumulate"], 0, 0, self._length, self._decision)
        return _Reading(kernels, alone, among_peers, undo)

    def _lay_out_exchange(
        self, packed_at: int, kept_at: int, tolerance: float, trigger: float, scale: float
    ) -> None:
        device, windows = self._device, self._memory.windows
        ranks, rank = self._transport.size, self._transport.rank
        sums: Any = self._transport.kernels
        collect = sums.collect_kernels()
        self._tell_selection = PreparedLaunch(
            collect["tell_selection"],
            self._packed.pointer, 0, 0, self._where.data.ptr, self._header, device.address("told"), windows, ranks, rank,
            self._step,
        )  # fmt: skip
        self._tell_kept = PreparedLaunch(
            collect["tell_kept"], windows, ranks, rank, self._decision, self._step
        )
        self._collect = PreparedLaunch(
            collect["collect_region"],
            windows, ranks, rank, packed_at, selection_cap(self.k), self.pool.pointer, self.pool.size, 0,
            self._decision, device.address("collected"), self._step,
        )  # fmt: skip
        self._clear = PreparedLaunch(self._kernels.clear_kernel, 0, self.gathered.pointer, 0, self._step)
        self._decide = PreparedLaunch(
            Kernel(compiled(_KERNELS / "decide.cu"), "decide", 12),
            windows, ranks, rank, device.table(CANDIDATES), self.k, selection_cap(self.k), double_bits(tolerance),
            double_bits(MISS), double_bits(trigger), self._decision, device.address("decided"), self._step,
        )  # fmt: skip
        self._apply = PreparedLaunch(
            Kernel(compiled(_KERNELS / "apply.cu"), "gather_and_apply", 13),
            windows, ranks, rank, kept_at, self._decision, self.gathered.pointer, 0, float_bits(scale), self._packed.pointer,
            self._header, 0, 0, self._step,
        )  # fmt: skip

    def _lay_out_sums(self) -> None:
        """Takes memory for a region as long as the gradient."""
        device, windows = self._device, self._memory.windows
        ranks, rank = self._transport.size, self._transport.rank
        sums: Any = self._transport.kernels
        cuts = device.scratch("peer cuts", ranks * (self._most_tiles + 1), np.uint32).data.ptr
        crowded = device.scratch("peer crowded tiles", self._most_tiles, np.uint32).data.ptr
        self._collect.values[7] = cuts
        self._crowded_blocks = sums.crowded_blocks

        def launches(ladder: int, told: int) -> list[PreparedLaunch]:
            return [
                PreparedLaunch(
                    kernel,
                    self.pool.pointer, cuts, ranks, 0, 0, 0, 0, ladder, self._sums.pointer, crowded, sums.sums_state, 0,
                    self._decision, told, ranks, rank, self._step,
                )
                for kernel in sums.sum_kernels
            ]  # fmt: skip

        self._count_sums = launches(device.table(CANDIDATES), windows)
        self._sum_all = launches(0, 0)
        self._keep_blocks = -(-self._sums.size // COMPACT_TILE)
        scan = device.scan("peer keep", self._keep_blocks)
        self._keep_sums = PreparedLaunch(
            sums.keep_kernel,
            self._sums.pointer, 0, self._kept.pointer, self._kept.size, sums.sums_state, scan.status, scan.ticket, 0, 0,
            self._decision, windows, ranks, rank, self._step,
        )  # fmt: skip
