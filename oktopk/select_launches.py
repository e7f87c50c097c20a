"""The launches of the fused accumulate-select-pack, laid out once for vectors and a list of given sizes."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from collectives.device import DeviceEntries
from collectives.launches import PreparedLaunch

if TYPE_CHECKING:
    from oktopk.device_kernels import DeviceKernels

_CHUNK = 1024  # of accumulate_select.cu: elements a warp
_WARPS = 8
_GROUP = 128  # chunks that one block compacts
_NO_REGIONS = 2**64 - 1  # -1


class SelectLaunches:
    """The two launches of `accumulate_select`, laid out for vectors and a list of given sizes.

    Attributes:
        select, compact: what is launched, in this order, on `blocks` and `groups` blocks of `THREADS`.
    """

    THREADS = 32 * _WARPS

    def __init__(self, kernels: DeviceKernels, width: int, n: int, entries: DeviceEntries) -> None:
        device = self._device = kernels.device
        self._header = kernels.header
        self.sizes = (n, entries.pointer, len(entries))
        typed = kernels.kernels_for(width)
        self._stream = device.stream.ptr
        chunks = -(-n // _CHUNK)
        self.blocks, self.groups = -(-chunks // _WARPS), -(-chunks // _GROUP)
        # four times what a chunk holds on average, and at least one for every lane
        slot = min(_CHUNK, max(32, -(-(4 * _CHUNK * (len(entries) // 2)) // n)))
        self._slots = device.allocate(chunks * slot, np.uint64)
        self._counts = device.allocate(chunks, np.uint32)
        slots, counts, nonfinite = self._slots.data.ptr, self._counts.data.ptr, kernels.nonfinite
        self.select = PreparedLaunch(
            typed["accumulate_select"], 0, 0, n, 0, slots, slot, counts, nonfinite, 0
        )
        finished = device.scratch("select finished", 1, np.uint32).data.ptr
        self.compact = PreparedLaunch(
            typed["compact_selection"],
            0, n, 0, slots, slot, counts, chunks, entries.pointer, len(entries), 0, _NO_REGIONS, nonfinite, 0, 0, 0,
            0, finished, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def among_peers(self, windows: int, ranks: int, rank: int, where: int, step: int) -> SelectLaunches:
        """The same launches for a step among peers; see peer.cuh.

        Args:
            where: address of the boundaries.
            step: address of what changes from step to step, the threshold among it.
        """
        mine = copy(self)
        mine.select = PreparedLaunch(self.select.kernel, *self.select.values)
        mine.select.values[8] = step
        mine.compact = PreparedLaunch(self.compact.kernel, *self.compact.values)
        values, scan = mine.compact.values, self._device.scan("peer select", self.groups)
        values[9], values[10] = where, ranks
        values[12], values[13] = scan.status, scan.ticket
        values[15], values[17] = self._header(ranks), self._device.address("told")
        values[18], values[19], values[20], values[21] = windows, ranks, rank, step
        return mine

    def enqueue(self, gradient: int, residual: int, stream: int) -> None:
        """Put both on a stream."""
        self.select.values[0], self.select.values[1] = gradient, residual
        self.select(self.blocks, self.THREADS, stream)
        self.compact.values[0] = residual
        self.compact(self.groups, self.THREADS, stream)

    def __call__(
        self, gradient: int, residual: int, threshold_bits: int, boundaries: tuple[int, int] | None
    ) -> None:
        """Launch for this rank alone.

        Args:
            boundaries: (address, regions) of the regions, where they are known.
        """
        scan = self._device.scan("select", self.groups)
        self.select.values[3] = threshold_bits
        values = self.compact.values
        values[2] = threshold_bits
        values[9], values[10] = boundaries or (0, _NO_REGIONS)
        values[12], values[13], values[14] = scan.status, scan.ticket, scan.epoch
        values[15] = self._header(boundaries[1] if boundaries else 0)
        values[17] = self._device.address("select")
        self.enqueue(gradient, residual, self._stream)
        self._device.pending = True
