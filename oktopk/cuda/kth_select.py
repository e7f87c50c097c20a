"""The launches that name an exact threshold: the k-th largest magnitude of lists, digit by digit, without the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from collectives.cuda.device import DeviceEntries
from collectives.cuda.kernels import COMPACT_TILE
from collectives.cuda.launch import Kernel, PreparedLaunch, compiled, double_bits
from collectives.mpi_cuda import CudaMpiTransport
from oktopk.cpu.kernels import LEVELS
from oktopk.settings import selection_cap

TAKEN_WORDS = 6
"""Of the report "taken": see kth.cu."""

_KERNELS = Path(__file__).parent
_SEARCH_WORDS = 5  # before two words a rank: see kth.cu


class KthSelect:
    """Laid out once for a k.

    Args:
        transport: of the ranks, which all use peer memory.
        k: entries wanted.
        trigger: a block this many times the mean is skewed.
        header: address of what a selection reports on the device.
        packed: ENTRY[2k], where a selection lies, and what is taken of it.
        sums: the sums of this rank's region, zeros among them, as many as the entries that were summed last.
        kept: what is taken of them.
        where: address of the boundaries.
        settled: address of the word by which a selection says that nothing is to be cut.
        windows, decision, step: addresses; see peer.cuh.
    """

    def __init__(
        self,
        transport: CudaMpiTransport,
        k: int,
        trigger: float,
        *,
        header: int,
        packed: DeviceEntries,
        sums: DeviceEntries,
        kept: DeviceEntries,
        where: int,
        settled: int,
        windows: int,
        decision: int,
        step: int,
    ) -> None:
        device = self._device = transport.device
        ranks, rank = transport.size, transport.rank
        kernels: Any = transport.kernels
        cap, counted = selection_cap(k), kernels.summed
        kth = compiled(_KERNELS / "kth.cu")
        histogram, agree = Kernel(kth, "kth_histogram", 17), Kernel(kth, "agree_on_digit", 12)
        take, take_cut = Kernel(kth, "take_named", 11), Kernel(kth, "take_cut", 16)
        search = device.scratch("search", _SEARCH_WORDS + 2 * ranks, np.uint32).data.ptr
        counts = device.scratch("digits", 1 << max(width for _, width in LEVELS), np.uint32).data.ptr
        finished = device.scratch("digits finished", 1, np.uint32).data.ptr
        device.report("taken", TAKEN_WORDS)
        device.report("cuts found", ranks)
        taken = device.address("taken")
        self._local, self._too_many, self._digits, self._agree = [], [], [], []
        for level, (shift, width) in enumerate(LEVELS):
            digit = (cap, level, shift, width, search, counts, finished)
            alone = (packed.pointer, header, header + 4, 2 * k, k, *digit, 0, 0, ranks, rank, 0)
            self._local.append(PreparedLaunch(histogram, *alone))
            self._too_many.append(PreparedLaunch(histogram, *alone[:-5], settled, *alone[-4:]))
            together = (sums.pointer, counted, 0, 0, k, *digit, decision, windows, ranks, rank, step)
            self._digits.append(PreparedLaunch(histogram, *together))
            mine = (windows, ranks, rank, k, cap, level, width, double_bits(trigger), search, decision)
            self._agree.append(PreparedLaunch(agree, *mine, device.address("decided"), step))
        self._take_local = PreparedLaunch(
            take, packed.pointer, header, search, 0, packed.pointer, 2 * k, 0, 0, 0, 0, taken
        )
        self._take_kept = PreparedLaunch(
            take, sums.pointer, counted, search, decision, kept.pointer, kept.size, 0, 0, 0, 0, taken
        )
        self._cut_tiles = -(-2 * k // COMPACT_TILE)
        scan = device.scan("peer cut", self._cut_tiles)
        self._take_cut = PreparedLaunch(
            take_cut,
            packed.pointer, 2 * k, search, settled, scan.status, scan.second, scan.ticket,
            device.scratch("cut taken", 2, np.uint32).data.ptr, device.scratch("cut finished", 1, np.uint32).data.ptr,
            where, header, device.address("told"), windows, ranks, rank, step,
        )  # fmt: skip
        found = device.address("cuts found")
        self._cut_taken, self._cut_selected = (
            PreparedLaunch(kernels.cuts_kernel, packed.pointer, 2 * k, count, ranks, found)
            for count in (taken, header)
        )
        device.scan("peer take", -(-sums.size // COMPACT_TILE))  # its memory, before a step needs it
        self._blocks = max(1, min(2 * device.processors, -(-k // 1024)))  # a few entries a thread

    def name_locally(self, most: int, stream: int) -> None:
        """Cut the selection down to the exact top k, and find where it splits evenly."""
        for histogram in self._local:
            histogram(self._blocks, 256, stream)
        self._take(self._take_local, most, stream)
        self._cut_taken(1, 128, stream)

    def tighten(self, stream: int) -> None:
        """Cut the selection down to its exact top k and tell the peers of it, unless it is settled; can be captured."""
        for histogram in self._too_many:
            histogram(self._blocks, 256, stream)
        self._take_cut(self._cut_tiles, 256, stream)

    def cut(self, stream: int) -> None:
        """Find where the selection splits evenly, as it is."""
        self._cut_selected(1, 128, stream)

    def name_globally(self, most: int, stream: int) -> None:
        """Agree on the exact global threshold, and take what reaches it; every rank's launches wait for all ranks'."""
        for histogram, agree in zip(self._digits, self._agree, strict=True):
            histogram(self._blocks, 256, stream)
            agree(1, 256, stream)
        self._take(self._take_kept, most, stream)

    def _take(self, launch: PreparedLaunch, most: int, stream: int) -> None:
        tiles = -(-most // COMPACT_TILE)
        scan = self._device.scan("peer take", tiles)
        values = launch.values
        values[6], values[7], values[8], values[9] = scan.status, scan.second, scan.ticket, scan.epoch
        launch(tiles, 256, stream)
