"""Entries in symmetric memory: the GPUs of a host copy them from there, without messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import Device, DeviceEntries
from collectives.sparse import ENTRY
from collectives.symmetric_memory import SymmetricMemory
from collectives.transport import MissingRanksError, Transport


class DeviceEntryWindows:
    """Entries of every rank of a host in a window of its own, which the others copy.

    No kernel waits for another rank: hosts meet in between, and their limits on time hold. A rank may write again when, after
    `gather`, every rank has waited for its stream and the hosts have met.

    Args:
        transport: of the ranks of one host, each with its GPU.
        device: of this rank.

    Attributes:
        capacity: entries that a window has room for, equal on all ranks; 0 until `reserve`.

    Memory: the most entries for which room was made, and a quarter more.
    """

    def __init__(self, transport: Transport, device: Device) -> None:
        self._transport, self._device = transport, device
        self.capacity = 0
        self._memory: SymmetricMemory | None = None
        self._refused = False

    def reserve(self, most: int) -> bool:
        """Make room for `most` entries on each rank; what was written is lost where there was less. Collective.

        Returns:
            False where there is no memory, on every rank alike, and ever after.
        """
        if most <= self.capacity:
            return True
        if self._refused:
            return False
        self.close()
        capacity = most + most // 4
        try:
            self._memory = SymmetricMemory(self._transport, self._device, capacity * ENTRY.itemsize)
        except MissingRanksError:
            raise
        except RuntimeError:  # no memory; on every rank alike
            self._refused = True
            return False
        self.capacity = capacity
        return True

    def write(self, entries: DeviceEntries) -> DeviceEntries:
        """Copy at most `capacity` entries to this rank's window, on the stream; returns the copy."""
        assert self._memory is not None
        written = self._memory.entries(self._memory.first, len(entries))
        written[:] = entries
        return written

    def gather(self, gathered: Any, counts: NDArray[np.int64]) -> None:
        """Fill ENTRY[sum(counts)] with the entries of all ranks in rank order, on the stream.

        Args:
            counts: int64[P], what each rank has written; every rank has waited for it, and the hosts have met since.

        Traffic: the entries of the others, counted where they are read from.
        """
        if self._memory is None:  # no rank has had an entry
            return
        first = 0
        for base, count in zip(self._memory.bases, counts.tolist(), strict=True):
            if count:
                at = gathered.pointer + first * ENTRY.itemsize
                self._device.copy(at, base + self._memory.first, count * ENTRY.itemsize)
                first += count
        own, others = int(counts[self._transport.rank]), self._transport.size - 1
        if own:
            self._transport.traffic.count(own * ENTRY.itemsize * others, others)

    def close(self) -> None:
        """Free the windows. Collective."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self.capacity = None, 0
