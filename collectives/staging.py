"""Device arrays over a library that moves host memory only: through pinned buffers.

What is sent is copied out on the stream, which is waited for; what arrives is copied in on the stream when it is waited
for. The library never gets a device address. Imports without a GPU: the copies are the device's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.host_transport import HostTransport
from collectives.transport import PersistentRound, Round, Transport

_SMALLEST = 4096  # bytes of the smallest buffer
# Buffers of one size that may wait for the stream. Two let a round receive while the last one is copied; more would only
# take memory.
_DRAINING = 2


class Copies(Protocol):
    """What staging needs of a device. Arrays are the device's own, contiguous."""

    @property
    def pending(self) -> bool:
        """Whether the stream may still have to read or write a buffer that was copied from or to."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """uint8[nbytes] of page-locked host memory."""

    def copy_out(self, host: NDArray[np.uint8], array: Any) -> None:
        """Enqueue a copy of a device array to uint8[array.nbytes]; returns before it is done."""

    def copy_in(self, array: Any, host: NDArray[np.uint8]) -> None:
        """Enqueue a copy of uint8[array.nbytes] to a device array; returns before it is done."""

    def synchronize(self) -> None:
        """Wait for the stream; `pending` is False then."""


class StagingBuffers:
    """Page-locked buffers, allocated once per size class and reused: four classes to an octave waste 25 % at most.

    Args:
        copies: the device that allocates them, and whose stream may still use one.

    Attributes:
        nbytes: bytes allocated.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._draining: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of at least `nbytes` that neither the library nor the stream uses."""
        size = size_class(nbytes)
        if not self._free[size]:
            if not self._copies.pending:
                self._reclaim()
            elif len(self._draining[size]) >= _DRAINING:
                self.synchronize()
        if self._free[size]:
            return self._free[size].pop()
        buffer = self._copies.pinned(size)
        self.nbytes += size
        return buffer

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer that nobody uses."""
        self._free[len(buffer)].append(buffer)

    def give_after_copy(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer that the stream will still read: it is reused once the stream was waited for."""
        self._draining[len(buffer)].append(buffer)

    def synchronize(self) -> None:
        """Wait for the stream, if anything is on it."""
        if self._copies.pending:
            self._copies.synchronize()
        self._reclaim()

    def _reclaim(self) -> None:
        for buffers in self._draining.values():
            while buffers:
                self.give(buffers.pop())


def size_class(nbytes: int) -> int:
    """Bytes of the buffer for `nbytes`: the next of four equal steps to a power of two."""
    step = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


class _StagedRequest(NamedTuple):
    """The library's requests for a pinned buffer, and the device array that a receive fills (None for a send)."""

    requests: list[Any]
    buffer: NDArray[np.uint8]
    target: Any


class StagedTransport(HostTransport):
    """Device arrays through pinned host memory; mixed into the transport of a library.

    Args:
        comm: as the library's transport. Collective.
        copies: the device.

    Attributes:
        buffers: the pinned memory.
    """

    def __init__(self, comm: Any, copies: Copies) -> None:
        library: Any = super()
        library.__init__(comm)
        self.buffers = StagingBuffers(copies)
        self._copies = copies
        self._prepared: dict[
            int, tuple[Any, NDArray[np.uint8]]
        ] = {}  # by the id of the array, which they keep alive

    def send(self, array: Any, dest: int, even_if_empty: bool = False) -> list[Any]:
        return self.send_all([(array, dest)], even_if_empty)

    def prepare_sends(self, arrays: Sequence[Any]) -> None:
        """Put the copies out on the stream. Arrays that are not sent after all keep their buffers until the next call."""
        for _, buffer in self._prepared.values():
            self.buffers.give_after_copy(buffer)
        self._prepared = {id(array): (array, self._copy_out(array)) for array in arrays if array.size}

    def _copy_out(self, array: Any) -> NDArray[np.uint8]:
        buffer = self.buffers.take(array.nbytes)
        self._copies.copy_out(buffer[: array.nbytes], array)
        return buffer

    def send_all(self, messages: Sequence[tuple[Any, int]], even_if_empty: bool = False) -> list[Any]:
        library: Any = super()
        staged = []
        for array, dest in messages:
            if array.size or even_if_empty:
                _, buffer = self._prepared.pop(id(array), (None, None))
                if buffer is None:
                    buffer = self._copy_out(array) if array.size else self.buffers.take(0)
                staged.append((buffer, array.nbytes, dest))
        if staged:
            self.buffers.synchronize()
        return [
            _StagedRequest(library.send(buffer[:nbytes], dest, even_if_empty), buffer, None)
            for buffer, nbytes, dest in staged
        ]

    def receive(self, array: Any, source: int) -> list[Any]:
        if not array.size:
            return []
        library: Any = super()
        buffer = self.buffers.take(array.nbytes)
        return [_StagedRequest(library.receive(buffer[: array.nbytes], source), buffer, array)]

    def receive_counted(self, array: Any, source: int) -> int:
        library: Any = super()
        buffer = self.buffers.take(array.nbytes)
        nbytes = library.receive_counted(buffer[: array.nbytes], source)
        count = nbytes // array.itemsize
        if count:
            self._copies.copy_in(array[:count], buffer[:nbytes])
        self.buffers.give_after_copy(buffer)
        return count

    def wait(self, requests: list[Any]) -> None:
        """Block until all have completed; what arrived is on its way to the device, in the order of the stream."""
        library: Any = super()
        library.wait([request for staged in requests for request in staged.requests])
        for _, buffer, target in requests:
            if target is None:
                self.buffers.give(buffer)
            else:
                self._copies.copy_in(target, buffer[: target.nbytes])
                self.buffers.give_after_copy(buffer)

    def persistent(self, exchange: Round) -> PersistentRound:
        return Transport.persistent(self, exchange)  # no requests of the library on device arrays
