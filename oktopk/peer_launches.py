"""The launches of a step among peers, laid out once for a k: buffers, windows, and every argument that stays."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.device import Kernel, PreparedLaunch, compiled, double_bits, float_bits
from collectives.device_kernels import tile_shift
from collectives.device_transport import DeviceTransport
from collectives.peer_memory import PeerMemory, entries_bytes
from oktopk.host_kernels import LEVELS
from oktopk.settings import Settings, selection_cap
from oktopk.thresholds import LADDER, MISS

if TYPE_CHECKING:
    from oktopk.device_kernels import DeviceKernels, SelectLaunches

COUNTS = 5
"""Words of a decision before the counts: see peer.cuh."""

_KERNELS = Path(__file__).parent / "kernels"
_POOL = 3  # a region's incoming entries, in multiples of k: regions balance
_ROOM = 1.5  # a region may be this much longer than an equal one before its launches are laid out anew
_COMPACT_TILE = 2048  # of compact.cuh
_STEP_WORDS = 8  # of a step: see peer.cuh
_TAKEN_WORDS = 6
_STAGES = ("select", "exchange", "reduce", "gather and apply")


class PeerLaunches:
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

    Memory: a window of 13k/4 entries and 0.8 MB; lists of 29k/4 entries beside it.
    """

    def __init__(
        self, kernels: DeviceKernels, transport: DeviceTransport, length: int, k: int, settings: Settings
    ) -> None:
        self.k = k
        self._kernels, self._transport, self._length = kernels, transport, length
        self._device = device = transport.device
        ranks = transport.size
        workspace: Any = transport.workspace
        packed_at = PeerMemory.first + -PeerMemory.first % 256
        kept_at = packed_at + entries_bytes(2 * k)
        kept = selection_cap(k) + 1
        self._memory = PeerMemory(transport.comm, device, kept_at + entries_bytes(kept))
        self._packed = self._memory.entries(packed_at, 2 * k)
        workspace.place("packed", self._packed)
        self._kept = self._memory.entries(kept_at, kept)
        self.pool = workspace.entries("incoming", _POOL * k)
        self.gathered = workspace.entries("gathered", selection_cap(k))
        self._sums = workspace.entries("region sums", _POOL * k + 1)
        self.selected = Announced(device, "told", 3 + ranks)
        self.packed_report = _report(device, "select", 3 + ranks)
        self.collected = _report(device, "collected", 3 * ranks + 1)
        self.decided = Announced(device, "decided", COUNTS + ranks)
        self.taken = _report(device, "taken", _TAKEN_WORDS)
        self.cuts = _report(device, "cuts found", ranks)
        self._words = _report(device, "step", _STEP_WORDS)
        self._where = device.allocate(ranks + 1, np.int64)
        self._decision = device.scratch("decision", COUNTS + 2 * ranks, np.uint32).data.ptr
        self._step = device.scratch("step", _STEP_WORDS, np.uint32).data.ptr
        self._header = kernels.header(ranks)
        self._side = cupy.cuda.Stream(non_blocking=True)
        self._forked, self._joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self.timed = False
        self._marks = [cupy.cuda.Event() for _ in range(len(_STAGES) + 1)]
        self._selects: dict[int, SelectLaunches] = {}
        equal = -(-length // ranks)
        self._shift = tile_shift(k, equal)
        self._tiles = max(1, -(-int(_ROOM * equal) >> self._shift))
        # enough to keep NVLink's latency covered, few enough to wait side by side
        self._copy_blocks = max(1, min(8 * device.processors // ranks, -(-2 * k // (256 * ranks))))
        self._list_blocks = max(1, min(2 * device.processors, -(-k // 1024)))  # a few entries a thread
        scale = 1.0 / ranks if settings.average else 1.0
        self._lay_out_exchange(packed_at, kept_at, settings.drift_tolerance, settings.balance_trigger, scale)
        self._lay_out_naming(settings.balance_trigger)
        self._lay_out_sums()
        device.synchronize()

    def set_step(self, epoch: int, local_bits: int, global_bits: int, support: int) -> None:
        """Say what is different about the next step."""
        words = self._words
        words[0], words[1], words[2], words[3] = epoch, local_bits, global_bits, support

    def place(self, boundaries: NDArray[np.int64]) -> bool:
        """Lay the launches out for new regions; whether graphs of them no longer hold."""
        rank = self._transport.rank
        self._where.set(boundaries, stream=self._device.stream)
        lower, upper = int(boundaries[rank]), int(boundaries[rank + 1])
        tiles = max(1, -(-(upper - lower) >> self._shift))
        self._words[4], self._words[5] = lower, tiles
        if tiles <= self._tiles:
            return False
        self._tiles = tiles
        self._lay_out_sums()
        return True

    def upload_step(self, stream: int) -> None:
        """Put what `set_step` and `place` said where kernels read it."""
        host_to_device = cupy.cuda.runtime.memcpyHostToDevice
        source = ctypes.addressof(self._words)
        cupy.cuda.runtime.memcpyAsync(self._step, source, 4 * _STEP_WORDS, host_to_device, stream)

    def tell(self, nnz: int, nonfinite: int, stream: int) -> None:
        """Tell the peers of a selection that lies in the buffer."""
        values = self._tell_selection.values
        values[1], values[2] = nnz, nonfinite
        self._tell_selection(1, 128, stream)

    def enqueue_whole(self, gradient: Any, vectors: tuple[int, ...], stream: int) -> None:
        """A regular step from the gradient on; can be captured. `vectors` as in `enqueue`, the gradient's address first."""
        self.upload_step(stream)
        width = gradient.dtype.itemsize
        select = self._selects.get(width)
        if select is None:
            transport, memory = self._transport, self._memory
            alone = self._kernels.select_launches(gradient, self._length, self._packed)
            select = self._selects[width] = alone.among_peers(
                memory.windows, transport.size, transport.rank, self._where.data.ptr, self._step
            )
        self._mark(0, stream)
        select.enqueue(vectors[0], vectors[1], stream)
        self._mark(1, stream)
        self.enqueue(vectors, stream, exact=False)

    def enqueue(self, vectors: tuple[int, ...], stream: int, exact: bool) -> None:
        """What follows the selection: (gradient, residual, update, velocity or 0) are addresses."""
        runtime, ranks = cupy.cuda.runtime, self._transport.size
        # scattered writes, in few blocks, next to kernels that wait for NVLink and shared memory
        runtime.eventRecord(self._forked.ptr, stream)
        runtime.streamWaitEvent(self._side.ptr, self._forked.ptr, 0)
        self._clear.values[0] = vectors[2]
        self._clear(2 * self._device.processors, 256, self._side.ptr)
        runtime.eventRecord(self._joined.ptr, self._side.ptr)
        self._collect(self._copy_blocks, 256, stream, ranks)
        self._mark(2, stream)
        if exact:
            self._sum_all(self._tiles, 256, stream)
            for histogram, agree in zip(self._digits, self._agree, strict=True):
                histogram(self._list_blocks, 256, stream)
                agree(1, 256, stream)
            self._take(self._take_kept, self.pool.size, stream)
            self._tell_kept(1, 128, stream)
        else:
            self._count_sums(self._tiles, 256, stream)
            self._decide(1, 128, stream)
            self._sum_again(self._tiles, 256, stream)
        self._mark(3, stream)
        runtime.streamWaitEvent(stream, self._joined.ptr, 0)
        values = self._apply.values
        values[6], values[10], values[11] = vectors[2], vectors[1], vectors[3]
        self._apply(self._copy_blocks, 256, stream, ranks)
        self._mark(4, stream)

    def enqueue_exact_selection(self, gradient: Any, residual: Any, lowest: int, stream: int) -> None:
        """Accumulate, and cut what reaches `lowest` down to the exact top k."""
        launches = self._kernels.select_launches(gradient, self._length, self._packed)
        launches(gradient.data.ptr, residual.data.ptr, lowest, None)
        for histogram in self._local_digits:
            histogram(self._list_blocks, 256, stream)
        self._take(self._take_local, 2 * self.k, stream)
        self._cut(1, 128, stream)

    def stage_seconds(self) -> list[tuple[str, float]]:
        """Seconds on the device by stage of the last timed step, which has ended."""
        elapsed = cupy.cuda.get_elapsed_time
        return [(name, elapsed(*self._marks[i : i + 2]) / 1e3) for i, name in enumerate(_STAGES)]

    def close(self) -> None:
        """Free the windows. Collective."""
        self._memory.close()

    def _mark(self, number: int, stream: int) -> None:
        if self.timed:
            cupy.cuda.runtime.eventRecord(self._marks[number].ptr, stream)

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
            windows, ranks, rank, packed_at, selection_cap(self.k), self.pool.pointer, self.pool.size, self._shift, 0,
            self._decision, device.address("collected"), self._step,
        )  # fmt: skip
        self._clear = PreparedLaunch(self._kernels.clear_kernel, 0, self.gathered.pointer, 0, self._step)
        self._decide = PreparedLaunch(
            Kernel(compiled(_KERNELS / "decide.cu"), "decide", 11),
            windows, ranks, rank, device.table(LADDER), self.k, double_bits(tolerance), double_bits(MISS), double_bits(trigger),
            self._decision, device.address("decided"), self._step,
        )  # fmt: skip
        self._apply = PreparedLaunch(
            Kernel(compiled(_KERNELS / "apply.cu"), "gather_and_apply", 13),
            windows, ranks, rank, kept_at, self._decision, self.gathered.pointer, 0, float_bits(scale), self._packed.pointer,
            self._header, 0, 0, self._step,
        )  # fmt: skip

    def _lay_out_sums(self) -> None:
        device, windows = self._device, self._memory.windows
        ranks, rank = self._transport.size, self._transport.rank
        sums: Any = self._transport.kernels
        cuts = device.scratch("peer cuts", ranks * (self._tiles + 1), np.uint32).data.ptr
        self._collect.values[8] = cuts
        scan = device.scan("peer sums", self._tiles)

        def launch(ladder: int, out: Any, again: int, told: int) -> PreparedLaunch:
            return PreparedLaunch(
                sums.sum_kernel,
                self.pool.pointer, cuts, ranks, 0, 0, self._shift, 0, ladder, out.pointer, out.size, sums.sums_state,
                scan.status, scan.ticket, 0, sums.sums_report, self._decision, again, told, ranks, rank, 0, self._step,
            )  # fmt: skip

        self._count_sums = launch(device.table(LADDER), self._kept, 0, windows)
        self._sum_again = launch(0, self._kept, 1, windows)
        self._sum_all = launch(0, self._sums, 0, 0)

    def _lay_out_naming(self, trigger: float) -> None:
        device, windows, k = self._device, self._memory.windows, self.k
        ranks, rank = self._transport.size, self._transport.rank
        sums: Any = self._transport.kernels
        cap, counted = selection_cap(k), sums.sums_state + 4
        kth = compiled(_KERNELS / "kth.cu")
        histogram = Kernel(kth, "kth_histogram", 17)
        agree, take = Kernel(kth, "agree_on_digit", 12), Kernel(kth, "take_named", 11)
        search = device.scratch("search", COUNTS + 2 * ranks, np.uint32).data.ptr
        counts = device.scratch("digits", 1 << max(width for _, width in LEVELS), np.uint32).data.ptr
        finished = device.scratch("digits finished", 1, np.uint32).data.ptr
        packed, found = self._packed.pointer, self._sums.pointer
        self._local_digits, self._digits, self._agree = [], [], []
        for level, (shift, width) in enumerate(LEVELS):
            digit = (cap, level, shift, width, search, counts, finished)
            self._local_digits.append(
                PreparedLaunch(
                    histogram, packed, self._header, self._header + 4, 2 * k, k, *digit, 0, 0, ranks, rank, 0
                )
            )
            self._digits.append(
                PreparedLaunch(
                    histogram,
                    found,
                    counted,
                    0,
                    0,
                    k,
                    *digit,
                    self._decision,
                    windows,
                    ranks,
                    rank,
                    self._step,
                )
            )
            self._agree.append(
                PreparedLaunch(
                    agree,
                    windows,
                    ranks,
                    rank,
                    k,
                    cap,
                    level,
                    width,
                    double_bits(trigger),
                    search,
                    self._decision,
                    device.address("decided"),
                    self._step,
                )
            )
        taken = device.address("taken")
        self._take_local = PreparedLaunch(
            take, packed, self._header, search, 0, packed, 2 * k, 0, 0, 0, 0, taken
        )
        self._take_kept = PreparedLaunch(
            take,
            found,
            counted,
            search,
            self._decision,
            self._kept.pointer,
            self._kept.size,
            0,
            0,
            0,
            0,
            taken,
        )
        self._cut = PreparedLaunch(sums.cuts_kernel, packed, 0, taken, ranks, device.address("cuts found"))

    def _take(self, launch: PreparedLaunch, most: int, stream: int) -> None:
        tiles = -(-most // _COMPACT_TILE)
        scan = self._device.scan("peer take", tiles)
        values = launch.values
        values[6], values[7], values[8], values[9] = scan.status, scan.second, scan.ticket, scan.epoch
        launch(tiles, 256, stream)


class Announced:
    """A report in pinned memory of words that tell whether they are there: the epoch above the value, in 64 bits.

    Args:
        device: whose kernels write it.
        name: of the report.
        count: words.
    """

    def __init__(self, device: Any, name: str, count: int) -> None:
        device.report(name, 2 * count)
        self._device = device
        self._words = (ctypes.c_uint64 * count).from_address(device.address(name))
        self._count = count

    def read(self, epoch: int) -> list[int]:
        """The values of that epoch; waits for them, and no longer."""
        self._device.watch(self._words, self._count - 1, epoch)
        while True:
            words = self._words[:]
            if all(word >> 32 == epoch for word in words):
                return [word & 0xFFFFFFFF for word in words]


def _report(device: Any, name: str, count: int) -> Any:
    """A report as plain integers: a slice of it costs a fraction of what NumPy's costs."""
    device.report(name, count)
    return (ctypes.c_uint32 * count).from_address(device.address(name))
