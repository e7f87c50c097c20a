"""Rows of a table in symmetric memory: kernels of all GPUs of a host read them there."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives.cuda.device import CuArray, Device, address_of
from collectives.cuda.rows import DeviceRowKernels
from collectives.sparse import Array
from collectives.symmetric_memory import GrowingMemory, SymmetricMemory, aligned
from collectives.table_rows import Rows
from collectives.transport import Transport


class DeviceRowWindows:
    """Rows of every rank where all ranks of a host can read them. A window has two slots, which take turns.

    A rank may change what it has published when it publishes the second time after that: the others have read it by then, if
    each of them has waited for its own reads before a collective operation in between, as `publish` does.

    Sums that are to be published are written where the others read them, and copied only where they had no room. No kernel waits
    for another rank: ranks meet in collective operations in between, and their limits on time hold, but not while larger windows
    are opened.

    Args:
        transport: of the ranks of one host, each with its GPU; see `Transport.p2p`.
        device: of this rank.
        kernels: of the table's element type.
        row_type, element_type: NumPy's, of ids and elements.
        width: elements of a row.

    Attributes:
        capacity: rows that a slot has room for, equal on all ranks.
        nbytes: of this rank's window.
        all_read_all: whether every rank reads all rows of the others in the next step, and sums them itself. Equal on all ranks.

    Memory: twice the most rows that a rank has published, and a quarter more.
    """

    def __init__(
        self,
        transport: Transport,
        device: Device,
        kernels: DeviceRowKernels,
        row_type: DTypeLike,
        element_type: DTypeLike,
        width: int,
    ) -> None:
        self._transport, self._device, self._kernels = transport, device, kernels
        self._types, self._width = (row_type, element_type), width
        self._id_bytes = np.dtype(row_type).itemsize
        self._row_bytes = width * np.dtype(element_type).itemsize
        self.capacity = self.nbytes = 0
        self.all_read_all = transport.size <= 2
        self._slot = 0
        self._slots: list[Rows] = []  # of this rank, each for so many rows
        self._windows = GrowingMemory(transport, device, "rows of the GPUs of a host")

    def coalesce(self, rows: Array, values: Array, length: int, scale: float) -> tuple[Rows, int]:
        """As that of the kernels; with room for the sums they lie where `publish` puts them, until the second one after it."""
        return self._kernels.coalesce(rows, values, length, scale, self._next)

    @property
    def _next(self) -> Rows | None:
        """The slot whose turn comes with the next publication."""
        return self._slots[1 - self._slot] if self._slots else None

    def publish(self, rows: Rows) -> None:
        """Put rows where the others read them after the next collective operation, if there is room. Waits for the copy."""
        self._slot = 1 - self._slot
        self._write(rows)

    def _write(self, rows: Rows) -> None:
        if 0 < len(rows) <= self.capacity and not self._is_written(rows):
            slot = self._slots[self._slot]
            for target, array in ((slot.rows, rows.rows), (slot.values, rows.values)):
                self._device.copy(address_of(target), address_of(array), array.nbytes)
        # the others read after the next collective operation of the hosts, which know no streams
        if self._device.pending:
            self._device.synchronize()

    def _is_written(self, rows: Rows) -> bool:
        """Whether rows lie in the slot whose turn it is."""
        return bool(self._slots) and address_of(rows.rows) == address_of(self._slots[self._slot].rows)

    def reserve(self, most: int, rows: Rows) -> bool:
        """Make room for `most` rows on each rank, and publish this rank's again where it lacked. Collective.

        Returns:
            False where there is no memory, on every rank alike.
        """
        if most <= self.capacity:
            return True
        capacity = most + most // 4
        nbytes = 2 * self._slot_bytes(capacity)
        self.capacity, self.nbytes, self._slots = 0, 0, []  # rows in the windows there are keep their memory
        if not self._windows.open(nbytes):
            return False
        self.capacity, self.nbytes = capacity, nbytes
        self._slots = [self._slot_at(slot * self._slot_bytes(capacity)) for slot in range(2)]
        self._write(rows)
        self._transport.barrier()
        return True

    def sum_lists(
        self, starts: NDArray[np.int64], counts: NDArray[np.int64], like: Rows, scale: float
    ) -> tuple[Rows, int]:
        """As `merge` of the kernels, of counts[r] rows of each rank r, from its starts[r] on, one rank after the other.

        The sums are to be published next, unless all read all.
        """
        lists, first = [], 0
        for rank, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            if count:
                ids, values = self._addresses(rank)
                lists.append((first, ids + start * self._id_bytes, values + start * self._row_bytes))
                first += count
        room = None if self.all_read_all else self._next
        return self._kernels.merge_into(room, lists, first, like, scale)

    def gather(self, counts: NDArray[np.int64], like: Rows) -> Rows:
        """The first counts[r] rows of each rank r, one after the other."""
        total = int(counts.sum())
        every = Rows(self._kernels.empty(total, like.rows), self._kernels.empty(total, like.values))
        first = 0
        for rank, count in enumerate(counts.tolist()):
            if count:
                ids, values = self._addresses(rank)
                self._copy(every.rows, first, ids, count, self._id_bytes)
                self._copy(every.values, first, values, count, self._row_bytes)
                first += count
        return every

    def _copy(self, target: CuArray, first: int, source: int, count: int, row_bytes: int) -> None:
        self._device.copy(address_of(target) + first * row_bytes, source, count * row_bytes)

    def _slot_at(self, at: int) -> Rows:
        """A slot of this rank's own window, so many bytes from its start."""
        row_type, element_type = self._types
        values_at = at + aligned(self.capacity * self._id_bytes)
        return Rows(
            self._memory.array(self.capacity, row_type, at),
            self._memory.array((self.capacity, self._width), element_type, values_at),
        )

    @property
    def _memory(self) -> SymmetricMemory:
        assert self._windows.memory is not None
        return self._windows.memory

    def _slot_bytes(self, capacity: int) -> int:
        return aligned(capacity * self._id_bytes) + aligned(capacity * self._row_bytes)

    def _addresses(self, rank: int) -> tuple[int, int]:
        """Of a rank's ids and of their values, in the slot whose turn it is; not before a rank had a row."""
        ids = self._memory.bases[rank] + self._memory.first + self._slot * self._slot_bytes(self.capacity)
        return ids, ids + aligned(self.capacity * self._id_bytes)

    def close(self) -> None:
        """Free the windows. Collective."""
        self._windows.close()
        self.capacity, self.nbytes, self._slots = 0, 0, []
