"""The launches that read a gradient, laid out once for vectors and a list of given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np

from collectives.cuda.device import Device, DeviceEntries
from collectives.cuda.launch import Kernel, PreparedLaunch
from oktopk.cuda.layouts import CHUNK, MOST_GROUP

_RESIDENT = 8  # blocks of compact_selection that a multiprocessor runs at once
_MOST_HEADER = 128  # words


def selection_header(device: Device, regions: int) -> int:
    """Device address of the header of the last selection (nnz, nonfinite, offsets), for kernels that follow it."""
    return int(device.scratch("select header", max(_MOST_HEADER, 3 + regions), np.uint32).data.ptr)


class SelectLaunches:
    """The two launches of `accumulate_select`, laid out for vectors and a list of given sizes.

    Args:
        kernels: accumulate_select and compact_selection, by name.
        nonfinite: address of the counter of elements that are not finite, 0 between launches.
        n: elements of the vectors.
        entries: what is selected goes there.

    Attributes:
        undo: through peer memory, takes a gradient out of the residual again where a step stopped
            for elements that are not finite; None for one that stays.
    """

    THREADS = 256
    undo: PreparedLaunch | None = None

    def __init__(
        self, device: Device, kernels: Mapping[str, Kernel], nonfinite: int, n: int, entries: DeviceEntries
    ) -> None:
        self._device = device
        self._other: SelectLaunches | None = None  # of another kind of gradient, the last that was asked for
        self.sizes = (n, entries.pointer, len(entries))
        chunks = -(-n // CHUNK)
        # all groups at work at once
        most = MOST_GROUP.bit_length() - 1
        shift = min(most, (-(-chunks // (_RESIDENT * device.processors)) - 1).bit_length())
        self.blocks, self.groups = chunks, -(-chunks >> shift)
        self._pool = device.allocate(len(entries), np.uint64)
        self._words = device.allocate(2 * chunks + self.groups + 2, np.uint32)
        words = self._words.data.ptr
        totals = words + 8 * chunks
        cursor = totals + 4 * self.groups
        device.zero(totals, 4 * self.groups + 8)
        shared: dict[str, Any] = {
            "pool": self._pool.data.ptr,
            "capacity": len(entries),
            "chunks": words,
            "totals": totals,
            "shift": shift,
            "cursor": cursor,
            "nonfinite": nonfinite,
        }
        self.select = kernels["accumulate_select"].prepare(n=n, **shared)
        self.compact = kernels["compact_selection"].prepare(
            num_chunks=chunks, finished=cursor + 4, entries=entries.pointer, regions=-1, **shared
        )

    def for_kernels(self, kernels: Mapping[str, Kernel]) -> SelectLaunches:
        """The same launches for another kind of gradient; all share the memory between the two."""
        kernel = kernels["accumulate_select"]
        if kernel is self.select.kernel:
            return self
        other = self._other
        if other is None or other.select.kernel is not kernel:
            other = copy(self)
            other.select, other._other = self.select.copy(kernel), None
            if self.undo is not None:
                undo = kernels.get("undo_accumulate")
                other.undo = None if undo is None else self.undo.copy(undo)
            self._other = other
        return other

    def for_p2p(self, undo: Kernel, **fields: Any) -> SelectLaunches:
        """The same launches for a step through peer memory.

        Args:
            undo: undo_accumulate.
            fields: of compact_selection, `p2p` among them.
        """
        other, p2p = copy(self), fields["p2p"]
        other.select, other._other = self.select.copy(step=p2p.step), None
        other.compact = self.compact.copy(**fields)
        other.undo = undo.prepare(n=self.sizes[0], decision=p2p.decision)
        return other

    def enqueue(self, gradient: int, residual: int, stream: int) -> None:
        """Put both on a stream. `gradient`, `residual`: addresses."""
        params = self.select.params
        params.gradient, params.residual = gradient, residual
        self.select(self.blocks, self.THREADS, stream)
        self.compact(self.groups, self.THREADS, stream)

    def run(
        self, gradient: int, residual: int, threshold_bits: int, boundaries: int = 0, regions: int = 0
    ) -> None:
        """Launch for this rank alone. `boundaries`: address, where the regions are known."""
        self.select.params.threshold = threshold_bits
        params = self.compact.params
        params.boundaries, params.regions = boundaries, regions if boundaries else -1
        params.header = selection_header(self._device, regions)
        params.report = self._device.address("select")
        self.enqueue(gradient, residual, self._device.stream.ptr)
        self._device.pending = True
