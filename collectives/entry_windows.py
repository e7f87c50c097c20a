"""Entries in symmetric memory: the GPUs of a host copy them from there, without messages."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from collectives.cuda.device import Device
from collectives.sparse import ENTRY
from collectives.symmetric_memory import GrowingMemory
from collectives.transport import Transport


class DeviceEntryWindows:
    """Entries of every rank of a host in a window of its own, which the others copy.

    No kernel waits for another rank: the ranks meet in collective operations between writing and copying, and between copying and
    writing again; before each of these every rank has waited for its stream.

    Args:
        transport: of the ranks of one host, each with its GPU.
        device: of this rank.

    Attributes:
        capacity: entries that a window has room for, equal on all ranks; 0 until `reserve`.

    Memory: on each rank the most entries for which room was made and a quarter more, to whole allocations of 2 MiB.
    """

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport, self._device = transport, device
        self.capacity = 0
        self._windows = GrowingMemory(transport, device, "entries of the GPUs of a host")

    def reserve(self, most: int) -> bool:
        """Make room for `most` entries on each rank. Collective. Opening larger windows drops what was written.

        Args:
            most: the most entries of any rank, equal on all ranks.

        Returns:
            False where there is no memory, on every rank alike, and ever after; the first rank warns once.

        Raises:
            MissingRanksError: as GrowingMemory.open.
        """
        if most <= self.capacity:
            return True
        self.capacity = 0
        if not self._windows.open((most + most // 4) * ENTRY.itemsize):
            return False
        assert self._windows.memory is not None
        self.capacity = self._windows.memory.payload // ENTRY.itemsize
        return True

    def write(self, entries: Any) -> Any:
        """Copy at most `capacity` entries to this rank's window, on the stream; returns the copy."""
        memory = self._windows.memory
        assert memory is not None
        written = memory.entries(memory.first, len(entries))
        written[:] = entries
        return written

    def gather(self, gathered: Any, counts: NDArray[Any]) -> None:
        """Copy the entries of all ranks, on the stream.

        Args:
            gathered: ENTRY[sum(counts)] in device memory, filled in rank order.
            counts: int64[P], what each rank has written.

        Traffic: 8 bytes for each entry of this rank and each other rank, in a message to each, counted where they are read from.
        """
        memory = self._windows.memory
        if memory is None:  # no rank has an entry
            return
        first = 0
        for base, count in zip(memory.bases, counts.tolist(), strict=True):
            if count:
                at = gathered.pointer + first * ENTRY.itemsize
                self._device.copy(at, base + memory.first, count * ENTRY.itemsize)
                first += count
        own, others = int(counts[self._transport.rank]), self._transport.size - 1
        if own:
            self._transport.traffic.count(own * ENTRY.itemsize * others, others)

    def close(self) -> None:
        """Free the windows. Collective."""
        self._windows.close()
        self.capacity = 0
