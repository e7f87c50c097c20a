"""The launches of the fused accumulate-select-pack, laid out once for vectors and a list of given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from collectives.cuda.device import DeviceEntries
from collectives.cuda.launch import Kernel, PreparedLaunch
from oktopk.settings import selection_cap

if TYPE_CHECKING:
    from oktopk.cuda.kernels import DeviceKernels

_CHUNK = 4096  # of accumulate_select.cu: elements a block
_LARGEST_GROUP = 5  # log2 of the chunks that one block compacts at most
_RESIDENT = 8  # such blocks that a multiprocessor runs at once
_NO_REGIONS = 2**64 - 1  # -1


class SelectLaunches:
    """The two launches of `accumulate_select`, laid out for vectors and a list of given sizes.

    Attributes:
        select, compact: what is launched, in this order, on `blocks` and `groups` blocks of `THREADS`.
    """

    THREADS = 256

    def __init__(self, kernels: DeviceKernels, width: int, n: int, entries: DeviceEntries) -> None:
        device = self._device = kernels.device
        self._header = kernels.header
        self.sizes = (n, entries.pointer, len(entries))
        typed = kernels.kernels_for(width)
        self._stream = device.stream.ptr
        chunks = -(-n // _CHUNK)
        # all groups at work at once
        shift = min(_LARGEST_GROUP, (-(-chunks // (_RESIDENT * device.processors)) - 1).bit_length())
        self.blocks, self.groups = chunks, -(-chunks >> shift)
        self._pool = device.allocate(len(entries), np.uint64)
        self._words = device.allocate(2 * chunks + self.groups + 2, np.uint32)
        pool, places, nonfinite = self._pool.data.ptr, self._words.data.ptr, kernels.nonfinite
        totals = places + 8 * chunks
        cursor, finished = totals + 4 * self.groups, totals + 4 * self.groups + 4
        device.zero(totals, 4 * self.groups + 8)
        self.select = PreparedLaunch(
            typed["accumulate_select"],
            0, 0, n, 0, pool, len(entries), places, totals, shift, cursor, nonfinite, 0,
        )  # fmt: skip
        self.compact = PreparedLaunch(
            typed["compact_selection"],
            pool, places, chunks, totals, shift, cursor, entries.pointer, len(entries), 0, _NO_REGIONS, nonfinite,
            0, finished, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def reading(self, kernels: Mapping[str, Kernel]) -> SelectLaunches:
        """The same launches, with what reads another kind of gradient; all share what lies between the two."""
        kernel = kernels["accumulate_select"]
        if kernel is self.select.kernel:
            return self
        other = copy(self)
        other.select = PreparedLaunch(kernel, *self.select.values)
        return other

    def among_peers(
        self, windows: int, ranks: int, rank: int, where: int, k: int, settled: int, step: int
    ) -> SelectLaunches:
        """The same launches for a step among peers; see peer.cuh.

        Args:
            where: address of the boundaries.
            k: entries wanted.
            settled: address of the word that says whether the selection is to be cut.
            step: address of what changes from step to step, the threshold among it.
        """
        mine = copy(self)
        mine.select = PreparedLaunch(self.select.kernel, *self.select.values)
        mine.select.values[11] = step
        mine.compact = PreparedLaunch(self.compact.kernel, *self.compact.values)
        values = mine.compact.values
        values[8], values[9] = where, ranks
        values[11], values[13] = self._header(ranks), self._device.address("told")
        values[14], values[15], values[16] = windows, ranks, rank
        values[17], values[18], values[19], values[20] = k, selection_cap(k), settled, step
        return mine

    def enqueue(self, gradient: int, residual: int, stream: int) -> None:
        """Put both on a stream. `gradient`, `residual`: addresses."""
        self.select.values[0], self.select.values[1] = gradient, residual
        self.select(self.blocks, self.THREADS, stream)
        self.compact(self.groups, self.THREADS, stream)

    def __call__(
        self, gradient: int, residual: int, threshold_bits: int, boundaries: tuple[int, int] | None
    ) -> None:
        """Launch for this rank alone.

        Args:
            boundaries: (address, regions) of the regions, where they are known.
        """
        self.select.values[3] = threshold_bits
        values = self.compact.values
        values[8], values[9] = boundaries or (0, _NO_REGIONS)
        values[11] = self._header(boundaries[1] if boundaries else 0)
        values[13] = self._device.address("select")
        self.enqueue(gradient, residual, self._stream)
        self._device.pending = True
