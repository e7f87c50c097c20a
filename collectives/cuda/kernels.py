"""Device kernels on sorted COO lists: the functions of `collectives.cpu.kernels`, on one GPU and stream.

They are methods of an object, because a kernel needs a stream and scratch, and instances side by side share neither.
Counts are read from pinned memory after a wait for the stream; every function that returns one waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import Device, DeviceEntries
from collectives.cuda.launch import Kernel, compiled, float_bits

_KERNELS = Path(__file__).parent
NARROWEST, WIDEST = 12, 16  # of region.cuh
NUM_CANDIDATES = 65
_SUMS_WORDS = 1 + NUM_CANDIDATES  # of what the kernels of sum_sorted_lists.cu report
_SUMS_STATE_WORDS = 4 + NUM_CANDIDATES
_SUMMED = 8  # where in it stands how many entries were summed
_ALONE = (0, 0, 0, 0, 0)  # the last arguments of a launch of sum_sorted_lists.cu that speaks to no peers
_FULL = 2048  # sums that a tile should hold: half of what it may, since large entries lie in crowds
COMPACT_TILE = 2048  # of compact.cuh
_COLLECT = {"tell_selection": 10, "tell_kept": 5, "collect_region": 11}  # name -> arguments
_COMPACT_THREADS = 256


def tile_shift(entries: int, length: int) -> int:
    """How wide the tiles of a region of `length` elements should be, as a power of two, where it gets so many entries."""
    width = _FULL * length // max(1, entries)
    return min(max(width.bit_length() - 1, NARROWEST), WIDEST)


class CountedSums:
    """A region's sums, counted around a threshold before it is known which of them to keep; as the host's.

    Attributes:
        counts: int64[m], descending: sums that reach each rung.
    """

    def __init__(self, keep: Callable[[int], int], out: DeviceEntries, rungs: NDArray[np.uint32]) -> None:
        self._keep = keep
        self._out = out
        self.counts = rungs[::-1].cumsum(dtype=np.int64)[::-1].copy()  # MPI takes no negative stride

    def take(self, threshold_bits: int) -> DeviceEntries:
        """ENTRY[nnz], the sums that reach one of the rungs; may be called once, before other lists are summed."""
        return self._out[: self._keep(threshold_bits)]


class DeviceKernels:
    """The kernels of one transport.

    Args:
        device: where they run.

    Attributes:
        sum_kernels: sum_tiles and sum_crowded, to be launched one after the other.
        keep_kernel: keep_sums.
        crowded_blocks: how many blocks of sum_crowded.
        sums_state: address of what these share from launch to launch.
        summed: address of the word that says how many entries were summed last.

    Memory: beside what the caller has, 8 bytes an entry of the most that were summed at once by `sum_sorted_lists` or
        `counted_sums`, and two words a tile, kept.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        sums = compiled(_KERNELS / "sum_sorted_lists.cu")
        lists = compiled(_KERNELS / "lists.cu")
        self._tile_cuts = Kernel(sums, "tile_cuts", 7)
        self.sum_kernels = Kernel(sums, "sum_tiles", 17), Kernel(sums, "sum_crowded", 17)
        self.keep_kernel = Kernel(sums, "keep_sums", 14)
        self._split_at_least = Kernel(lists, "split_at_least", 12)
        self._split_points = Kernel(lists, "region_offsets", 5)
        self.cuts_kernel = Kernel(lists, "equal_count_splits", 5)
        self._write_block = Kernel(lists, "write_block", 4)
        self._add_values = Kernel(lists, "add_values", 3)
        self._scale_values = Kernel(lists, "scale_values", 3)
        self.sums_state = int(device.scratch("sums state", _SUMS_STATE_WORDS, np.uint32).data.ptr)
        self.summed = self.sums_state + _SUMMED
        self.crowded_blocks = 2 * device.processors  # few: often they have nothing to do
        device.report("sums", _SUMS_WORDS)

    def collect_kernels(self) -> dict[str, Kernel]:
        """The kernels of collect.cu, by name."""
        collect = compiled(_KERNELS / "collect.cu")
        return {name: Kernel(collect, name, size) for name, size in _COLLECT.items()}

    def sum_sorted_lists(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
        threshold_bits: int,
        out: DeviceEntries,
    ) -> int:
        """As the host's."""
        made = self._launch_sums(pool, begins, ends, lower, upper, threshold_bits)
        return self._keep_sums(made, out, threshold_bits)

    def counted_sums(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
        expected_bits: int,
        offsets: NDArray[np.int64],
        out: DeviceEntries,
    ) -> CountedSums:
        """As the host's, for 65 offsets."""
        made = self._launch_sums(pool, begins, ends, lower, upper, expected_bits, offsets)
        self.device.synchronize()
        rungs = self.device.report("sums", _SUMS_WORDS)[1:]
        return CountedSums(partial(self._keep_sums, made, out), out, rungs)

    def _launch_sums(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
        threshold_bits: int,
        offsets: NDArray[np.int64] | None = None,
    ) -> DeviceEntries:
        """Sum, and count on the ladder if there is one; what comes back holds the sums until the next launch."""
        device, lists = self.device, len(begins)
        entries = int(ends.sum() - begins.sum())
        shift = tile_shift(entries, upper - lower)
        tiles = max(1, -(-(upper - lower) >> shift))
        ranges = device.post("ranges", np.concatenate([begins, ends]))
        cuts = device.scratch("tile cuts", lists * (tiles + 1), np.uint32).data.ptr
        blocks = -(-(tiles + 1) // 128)
        device.launch(
            self._tile_cuts, blocks, 128, pool.pointer, ranges, lists, lower, tiles, shift, cuts, rows=lists
        )
        memory = device.scratch("sums made", max(1, entries), np.uint64)
        made = DeviceEntries(device, memory.data.ptr, entries, memory)
        table = 0 if offsets is None else device.table(offsets)
        crowded = device.scratch("crowded tiles", tiles, np.uint32).data.ptr
        for kernel, blocks in zip(self.sum_kernels, (tiles, self.crowded_blocks), strict=True):
            device.launch(
                kernel, blocks, 256,
                pool.pointer, cuts, lists, lower, tiles, shift, threshold_bits, table, made.pointer, crowded, self.sums_state,
                device.address("sums"), *_ALONE,
            )  # fmt: skip
        return made

    def _keep_sums(self, made: DeviceEntries, out: DeviceEntries, threshold_bits: int) -> int:
        """Keep of what the last launch summed; waits. Returns how many reach the threshold."""
        device = self.device
        blocks = max(1, -(-len(made) // COMPACT_TILE))
        scan = device.scan("keep", blocks)
        device.launch(
            self.keep_kernel, blocks, _COMPACT_THREADS,
            made.pointer, threshold_bits, out.pointer, len(out), self.sums_state, scan.status, scan.ticket, scan.epoch,
            device.address("sums"), *_ALONE,
        )  # fmt: skip
        device.synchronize()
        return int(device.report("sums", _SUMS_WORDS)[0])

    def split_at_least(
        self,
        entries: DeviceEntries,
        threshold_bits: int,
        ties: int,
        kept: DeviceEntries,
        rest: DeviceEntries | None,
    ) -> tuple[int, int]:
        """As the host's."""
        if not len(entries):
            return 0, 0
        device = self.device
        tiles = -(-len(entries) // COMPACT_TILE)
        scan = device.scan("split", tiles)
        report = device.report("split", 2)
        device.launch(
            self._split_at_least,
            tiles,
            _COMPACT_THREADS,
            entries.pointer,
            len(entries),
            threshold_bits,
            max(0, ties),
            kept.pointer,
            len(kept),
            0 if rest is None else rest.pointer,
            scan.status,
            scan.second,
            scan.ticket,
            scan.epoch,
            device.address("split"),
        )
        device.synchronize()
        return int(report[0]), int(report[1])

    def take_at_least(
        self, entries: DeviceEntries, threshold_bits: int, ties: int, out: DeviceEntries
    ) -> int:
        """As the host's."""
        return self.split_at_least(entries, threshold_bits, ties, out, None)[0]

    def count_at_least(self, entries: DeviceEntries, edges: NDArray[np.int32]) -> NDArray[np.int64]:
        """As the host's, one pass for each of few edges."""
        out = self.device.scratch("counted", len(entries), np.uint64)
        target = DeviceEntries(self.device, out.data.ptr, len(entries), out)
        return np.array(
            [self.take_at_least(entries, int(edge), 2**31 - 1, target) for edge in edges], np.int64
        )

    def region_offsets(self, entries: DeviceEntries, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """As the host's."""
        device = self.device
        report = device.report("points", len(boundaries))
        at = device.post("boundaries to find", boundaries)
        device.launch(
            self._split_points, 1, 128, entries.pointer, len(entries), at, len(boundaries),
            device.address("points"),
        )  # fmt: skip
        device.synchronize()
        return report[: len(boundaries)].astype(np.int64)

    def equal_count_splits(self, entries: DeviceEntries, length: int, parts: int) -> NDArray[np.int64]:
        """As the host's."""
        if not len(entries) or parts == 1:
            return length * np.arange(1, parts, dtype=np.int64) // parts
        device = self.device
        report = device.report("cuts", parts)
        device.launch(
            self.cuts_kernel,
            1,
            128,
            entries.pointer,
            len(entries),
            0,
            parts,
            device.address("cuts"),
        )
        device.synchronize()
        return report[: parts - 1].astype(np.int64)

    def write_block(self, entries: DeviceEntries, lower: int, block: DeviceEntries) -> None:
        """As the host's; waits, since what it writes is sent next."""
        self.device.zero(block.pointer, block.nbytes)
        self.device.launch_for(
            self._write_block,
            len(entries),
            entries.pointer,
            len(entries),
            lower,
            block.pointer,
        )
        self.device.synchronize()

    def add_values(self, kept: Any, incoming: Any) -> None:
        """As the host's."""
        self.device.launch_for(self._add_values, kept.size, kept.data.ptr, incoming.data.ptr, kept.size)

    def scale_values(self, values: Any, scale: float) -> None:
        """As the host's."""
        self.device.launch_for(
            self._scale_values, values.size, values.data.ptr, values.size, float_bits(scale)
        )
