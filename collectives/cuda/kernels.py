"""Device kernels on sorted COO lists: the functions of `collectives.cpu.kernels`, on one GPU and stream.

Methods of an object, because a kernel needs a stream and scratch memory, which instances must not share. Every function that
returns a count waits for the stream.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import CountedSums
from collectives.cuda.device import CuArray, Device, DeviceEntries
from collectives.cuda.launch import Kernel, compiled
from collectives.cuda.layouts import (
    COMPACT_THREADS,
    COMPACT_TILE,
    DECODE_WORDS,
    NARROWEST,
    NUM_COUNTERS,
    WIDEST,
    CodecState,
    Region,
    SumsState,
)

_KERNELS = Path(__file__).parent
_SUMS_WORDS = 1 + NUM_COUNTERS  # that the kernels of sum_sorted_lists.cu report
_FULL = 2048  # sums that a tile should hold: half of what it may, since large entries lie close together


def tile_shift(entries: int, length: int) -> int:
    """log2 of the elements of a tile, for a region of `length` elements that gets so many entries."""
    width = _FULL * length // max(1, entries)
    return min(max(width.bit_length() - 1, NARROWEST), WIDEST)


class DeviceKernels:
    """The kernels of one transport.

    Args:
        device: where they run.

    Attributes:
        sum_kernels: sum_tiles and sum_overflowed_tiles, to be launched one after the other.
        keep_kernel: keep_sums.
        overflow_blocks: blocks for sum_overflowed_tiles.
        sums_state: address of the SumsState that these share.
        summed: address of the word that holds how many entries were summed last.

    Memory: beside what the caller has, 8 bytes an entry of the most that were summed at once by `sum_sorted_lists` or
        `counted_sums`, and two words a tile, kept.
    """

    ASYNCHRONOUS = True
    sends_wait = True
    """Whether the host waits for what it sends, as MPI asks for; NCCL waits on the GPU alone."""

    def __init__(self, device: Device) -> None:
        self.device = device
        sums = compiled(_KERNELS / "sum_sorted_lists.cu")
        lists = compiled(_KERNELS / "lists.cu")
        self._split_tiles = Kernel(sums, "split_tiles").prepare()
        self.sum_kernels = Kernel(sums, "sum_tiles"), Kernel(sums, "sum_overflowed_tiles")
        self.keep_kernel = Kernel(sums, "keep_sums")
        self._split_at_least = Kernel(lists, "split_at_least")
        self._region_offsets = Kernel(lists, "region_offsets")
        self._equal_count_splits = Kernel(lists, "equal_count_splits")
        self._write_block = Kernel(lists, "write_block")
        self._add_values = Kernel(lists, "add_values")
        self._scale_values = Kernel(lists, "scale_values")
        codec = compiled(_KERNELS / "codec.cu")
        self._encode, self._decode = Kernel(codec, "encode_entries"), Kernel(codec, "decode_entries")
        self._encode_values = Kernel(codec, "encode_values")
        self._decode_values = Kernel(codec, "decode_values")
        self._cut_values = Kernel(codec, "cut_values")
        self._codec_state = int(
            device.scratch("codec state", ctypes.sizeof(CodecState) // 4, np.uint32).data.ptr
        )
        words = ctypes.sizeof(SumsState) // 4
        self.sums_state = int(device.scratch("sums state", words, np.uint32).data.ptr)
        self.summed = self.sums_state + SumsState.entries.offset
        self.overflow_blocks = 2 * device.processors  # few: often they have nothing to do
        device.report("sums", _SUMS_WORDS)
        shared = {"state": self.sums_state, "report": device.address("sums")}
        self._sum_tiles = [kernel.prepare(**shared) for kernel in self.sum_kernels]
        # begins and ends of the lists that the launches are prepared for
        self._laid_out: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._sums: DeviceEntries

    def collect_kernels(self) -> dict[str, Kernel]:
        """The kernels of collect.cu, by name."""
        collect = compiled(_KERNELS / "collect.cu")
        names = ("put_selection", "put_kept", "await_signal", "collect_region")
        return {name: Kernel(collect, name) for name in names}

    def sum_sorted_lists(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
        threshold_bits: int,
        out: DeviceEntries,
    ) -> tuple[int, int]:
        sums = self._launch_sums(pool, begins, ends, lower, upper, threshold_bits)
        self._keep_sums(sums, out, threshold_bits)
        self.device.synchronize()
        report = self.device.report("sums", _SUMS_WORDS)
        return int(report[0]), int(report[-1])

    def counted_sums(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
        expected_bits: int,
        candidates: NDArray[np.int64],
        out: DeviceEntries,
    ) -> CountedSums:
        """As the host's, for 65 candidates."""
        sums = self._launch_sums(pool, begins, ends, lower, upper, expected_bits, candidates)
        self.device.synchronize()
        counted = self.device.report("sums", _SUMS_WORDS)[1:]
        counts = counted.astype(np.int64)
        counted[-2::-1].cumsum(out=counts[-2::-1])

        def take(bits: int, count: int) -> DeviceEntries:
            self._keep_sums(sums, out, bits)
            return out[:count]

        return CountedSums(counts, take)

    def codec_report(self, ranks: int) -> NDArray[np.float64]:
        """As the host's, in pinned memory. The kernels that write to it have ended once the stream was waited for."""
        return self.device.report("codec", 10 * ranks)[: 10 * ranks].view(np.float64).reshape(ranks, 5)

    def wait(self) -> None:
        """Wait for everything that was started."""
        self.device.synchronize()

    def finish_encoding(self) -> None:
        """Wait for what was encoded, where the host has not waited before it was sent."""
        if not self.sends_wait:
            self.wait()

    def cut_values(self, entries: DeviceEntries, others: DeviceEntries) -> None:
        fields = {"entries": entries.pointer, "others": others.pointer}
        self.device.launch_for(self._cut_values, len(entries), **fields)

    def encode_entries(
        self,
        entries: DeviceEntries,
        wire: DeviceEntries,
        layout: Any,
        rounds: bool,
        report: NDArray[np.float64],
    ) -> None:
        """As the host's; does not wait."""
        blocks = -(-len(entries) // 2048)  # of eight warps, each for 256 entries
        self.device.launch(
            self._encode, min(blocks, 8 * self.device.processors), 256,
            entries=entries.pointer, wire=wire.pointer, lower=layout.lower, count=layout.count, bits=layout.bits,
            low_bits=layout.low_bits, values=layout.values, lows=layout.lows, bitmap=layout.bitmap, words=layout.words,
            rounds=rounds, state=self._codec_state, report=report.ctypes.data,
        )  # fmt: skip

    def decode_entries(
        self, wire: DeviceEntries, layout: Any, out: DeviceEntries, damage: NDArray[np.float64]
    ) -> None:
        """As the host's; does not wait."""
        tiles = max(1, -(-(layout.words - layout.bitmap) // DECODE_WORDS)) if layout.bits else 1
        self.device.launch(
            self._decode, tiles, 256,
            wire=wire.pointer, out=out.pointer, lower=layout.lower, length=layout.length, count=layout.count, bits=layout.bits,
            low_bits=layout.low_bits, values=layout.values, lows=layout.lows, bitmap=layout.bitmap, words=layout.words,
            scan=self.device.scan("decode", tiles), state=self._codec_state, report=damage.ctypes.data,
        )  # fmt: skip

    def encode_values(
        self,
        entries: DeviceEntries,
        wire: DeviceEntries,
        layout: Any,
        rounds: bool,
        report: NDArray[np.float64],
    ) -> None:
        """As the host's; does not wait."""
        blocks = -(-len(entries) // 2048)  # of eight warps, each for 256 entries
        self.device.launch(
            self._encode_values, min(blocks, 8 * self.device.processors), 256,
            entries=entries.pointer, wire=wire.pointer, count=layout.count, bits=layout.bits, values=layout.values,
            words=layout.words, rounds=rounds, state=self._codec_state, report=report.ctypes.data,
        )  # fmt: skip

    def decode_values(
        self, wire: DeviceEntries, layout: Any, out: DeviceEntries, add: bool, report: NDArray[np.float64]
    ) -> None:
        """As the host's; does not wait."""
        self.device.launch_for(
            self._decode_values, len(out),
            wire=wire.pointer, out=out.pointer, bits=layout.bits, values=layout.values, add=add, report=report.ctypes.data,
        )  # fmt: skip

    def lay_out_sums(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
    ) -> None:
        """Prepare the launches that sum these lists, which may still arrive; the next sum of these very arrays only launches."""
        self._laid_out = None  # until all is prepared
        device, lists = self.device, len(begins)
        entries = int(ends.sum() - begins.sum())
        shift = tile_shift(entries, upper - lower)
        tiles = max(1, -(-(upper - lower) >> shift))
        memory = device.scratch("sums", max(1, entries), np.uint64)
        self._sums = DeviceEntries(device, memory.data.ptr, entries, memory)
        splits = device.scratch("tile splits", lists * (tiles + 1), np.uint32).data.ptr
        overflowed = device.scratch("overflowed tiles", tiles, np.uint32).data.ptr
        self._split_tiles.params.ranges = device.post("ranges", np.concatenate([begins, ends]))
        region = Region(lower, tiles, shift, 0, 0)
        for launch in (self._split_tiles, *self._sum_tiles):
            params = launch.params
            params.pool, params.splits, params.lists, params.region = pool.pointer, splits, lists, region
        for launch in self._sum_tiles:
            launch.params.sums, launch.params.overflowed = self._sums.pointer, overflowed
        self._laid_out = begins, ends

    def _launch_sums(
        self,
        pool: DeviceEntries,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        lower: int,
        upper: int,
        threshold_bits: int,
        candidates: NDArray[np.int64] | None = None,
    ) -> DeviceEntries:
        """Sum, and count at the candidates if there are any; the result holds the sums until the next launch."""
        device, known = self.device, self._laid_out
        if known is None or known[0] is not begins or known[1] is not ends:
            self.lay_out_sums(pool, begins, ends, lower, upper)
            self._laid_out = None  # the caller may change the arrays
        split, stream = self._split_tiles, device.stream.ptr
        tiles = split.params.region.tiles
        table = 0 if candidates is None else device.table(candidates)
        device.pending = True
        split(-(-(tiles + 1) // 128), 128, stream, split.params.lists)
        for launch, blocks in zip(self._sum_tiles, (tiles, self.overflow_blocks), strict=True):
            launch.params.region.threshold, launch.params.candidates = threshold_bits, table
            launch(blocks, 256, stream)
        return self._sums

    def _keep_sums(self, sums: DeviceEntries, out: DeviceEntries, threshold_bits: int) -> None:
        """Keep of what the last launch summed; does not wait. The report "sums" says first how many reach the threshold."""
        device = self.device
        blocks = max(1, -(-len(sums) // COMPACT_TILE))
        device.launch(
            self.keep_kernel, blocks, COMPACT_THREADS,
            sums=sums.pointer, threshold=threshold_bits, kept=out.pointer, capacity=len(out), state=self.sums_state,
            scan=device.scan("keep", blocks), report=device.address("sums"),
        )  # fmt: skip

    def split_at_least(
        self,
        entries: DeviceEntries,
        threshold_bits: int,
        ties: int,
        kept: DeviceEntries,
        rest: DeviceEntries | None,
    ) -> tuple[int, int]:
        if not len(entries):
            return 0, 0
        device = self.device
        tiles = -(-len(entries) // COMPACT_TILE)
        report = device.report("split", 2)
        device.launch(
            self._split_at_least, tiles, COMPACT_THREADS,
            entries=entries.pointer, n=len(entries), threshold=threshold_bits, ties=max(0, ties), kept=kept.pointer,
            capacity=len(kept), rest=0 if rest is None else rest.pointer, scan=device.scan("split", tiles),
            report=device.address("split"),
        )  # fmt: skip
        device.synchronize()
        return int(report[0]), int(report[1])

    def take_at_least(
        self, entries: DeviceEntries, threshold_bits: int, ties: int, out: DeviceEntries
    ) -> int:
        return self.split_at_least(entries, threshold_bits, ties, out, None)[0]

    def count_at_least(self, entries: DeviceEntries, thresholds: NDArray[np.int32]) -> NDArray[np.int64]:
        """As the host's."""
        out = self.device.scratch("counted", len(entries), np.uint64)
        target = DeviceEntries(self.device, out.data.ptr, len(entries), out)
        return np.array(
            [self.take_at_least(entries, int(threshold), 2**31 - 1, target) for threshold in thresholds],
            np.int64,
        )

    def region_offsets(self, entries: DeviceEntries, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        device, count = self.device, len(boundaries)
        report = device.report("offsets", count)
        device.launch(
            self._region_offsets, 1, 128,
            entries=entries.pointer, n=len(entries), boundaries=device.post("boundaries to find", boundaries), count=count,
            report=device.address("offsets"),
        )  # fmt: skip
        device.synchronize()
        return report[:count].astype(np.int64)

    def equal_count_splits(self, entries: DeviceEntries, length: int, parts: int) -> NDArray[np.int64]:
        if not len(entries) or parts == 1:
            return length * np.arange(1, parts, dtype=np.int64) // parts
        device = self.device
        report = device.report("splits", parts)
        device.launch(
            self._equal_count_splits, 1, 128,
            entries=entries.pointer, n=len(entries), parts=parts, report=device.address("splits"),
        )  # fmt: skip
        device.synchronize()
        return report[: parts - 1].astype(np.int64)

    def write_block(self, entries: DeviceEntries, lower: int, block: DeviceEntries) -> None:
        """As the host's; waits, since what it writes is sent next."""
        fields = {"entries": entries.pointer, "lower": lower, "block": block.pointer}
        self.device.zero(block.pointer, block.nbytes)
        self.device.launch_for(self._write_block, len(entries), **fields)
        self.device.synchronize()

    def add_values(self, kept: CuArray, incoming: CuArray) -> None:
        addresses = {"kept": kept.data.ptr, "incoming": incoming.data.ptr}
        self.device.launch_for(self._add_values, kept.size, **addresses)

    def scale_values(self, values: CuArray, scale: float) -> NDArray[np.uint32]:
        report = self.device.report("scaled", 1)
        report[0] = 0
        fields = {"values": values.data.ptr, "scale": scale, "report": self.device.address("scaled")}
        self.device.launch_for(self._scale_values, values.size, **fields)
        return report
