"""The transport from device arrays to an MPI that moves host memory only: through pinned buffers.

What is sent is copied out on the stream and waited for; what arrives is copied in on the stream when it is waited for.
MPI never sees a device address. Needs no GPU to be imported: the copies are the device's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.mpi import PersistentRound, Round, Transport

_SMALLEST = 4096  # bytes of the smallest buffer
# Buffers of a class that may wait for the stream before another is made. With two, a round that receives into one while the
# other drains waits for nothing; more would be allocated by a rank that receives often and never sends.
_DRAINING = 2


class Copies(Protocol):
    """All that staging asks of a device. Arrays are its own, contiguous."""

    @property
    def pending(self) -> bool:
        """Whether the stream may still have to read or write a buffer that was copied from or to."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """uint8[nbytes] of page-locked host memory."""

    def copy_out(self, host: NDArray[np.uint8], array: Any) -> None:
        """Put a copy of a device array to uint8[array.nbytes] on the stream; returns before it is done."""

    def copy_in(self, array: Any, host: NDArray[np.uint8]) -> None:
        """Put a copy of uint8[array.nbytes] to a device array on the stream; returns before it is done."""

    def synchronize(self) -> None:
        """Wait for the stream; `pending` is False then."""


class StagingBuffers:
    """Page-locked buffers, made once per size class and used again: four classes to an octave, so 25 % are wasted at most.

    Args:
        copies: the device that makes them, and whose stream may still be using one.

    Attributes:
        nbytes: bytes held.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._draining: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of at least so many bytes that neither MPI nor the stream is using."""
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
        """Hand back a buffer that nobody is using."""
        self._free[len(buffer)].append(buffer)

    def give_after_copy(self, buffer: NDArray[np.uint8]) -> None:
        """Hand back a buffer that the stream will still read: it is used again once the stream has been waited for."""
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
    """The size of the buffer for so many bytes: the next of four equal steps to a power of two."""
    step = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


class StagedRequest(MPI.Request):
    """A request on a pinned buffer, and the device array that it fills, if it is a receive."""

    buffer: NDArray[np.uint8]
    target: Any

    def __new__(cls, request: MPI.Request, buffer: NDArray[np.uint8], target: Any) -> StagedRequest:
        """Take over MPI's request."""
        made = super().__new__(cls, request)
        made.buffer, made.target = buffer, target
        return made


class StagedRound(PersistentRound):
    """A Round of device arrays. It borrows buffers while it runs, so that many rounds share a few."""

    def __init__(self, exchange: Round, transport: StagingTransport) -> None:
        super().__init__([], 0, 0, lambda: transport.traffic)
        self._exchange = exchange
        self._transport = transport

    def run(self) -> None:
        exchange, transport = self._exchange, self._transport
        receives = transport.receive(exchange.incoming, exchange.source)
        transport.wait(receives + transport.send(exchange.outgoing, exchange.dest))


class StagingTransport(Transport):
    """Device arrays over any MPI.

    Args:
        comm: as `Transport`. Collective.
        copies: the device.

    Attributes:
        buffers: the pinned memory.

    Traffic: as a transport that MPI gives device memory to, word by word.
    """

    def __init__(self, comm: MPI.Intracomm, copies: Copies) -> None:
        super().__init__(comm)
        self.buffers = StagingBuffers(copies)
        self._copies = copies

    def send(self, array: Any, dest: int, even_if_empty: bool = False) -> list[MPI.Request]:
        return self.send_all([(array, dest)], even_if_empty)

    def send_all(self, messages: Sequence[tuple[Any, int]], even_if_empty: bool = False) -> list[MPI.Request]:
        staged = []
        for array, dest in messages:
            if array.size or even_if_empty:
                buffer = self.buffers.take(array.nbytes)
                if array.size:
                    self._copies.copy_out(buffer[: array.nbytes], array)
                staged.append((buffer, array.nbytes, dest))
        if staged:
            self.buffers.synchronize()
        requests: list[MPI.Request] = []
        for buffer, nbytes, dest in staged:
            (request,) = super().send(buffer[:nbytes], dest, even_if_empty)
            requests.append(StagedRequest(request, buffer, None))
        return requests

    def receive(self, array: Any, source: int) -> list[MPI.Request]:
        if not array.size:
            return []
        buffer = self.buffers.take(array.nbytes)
        (request,) = super().receive(buffer[: array.nbytes], source)
        return [StagedRequest(request, buffer, array)]

    def receive_counted(self, array: Any, source: int) -> int:
        buffer = self.buffers.take(array.nbytes)
        nbytes = super().receive_counted(buffer[: array.nbytes], source)
        count = nbytes // array.itemsize
        if count:
            self._copies.copy_in(array[:count], buffer[:nbytes])
        self.buffers.give_after_copy(buffer)
        return count

    def wait(self, requests: list[MPI.Request]) -> None:
        """Block until all have completed; what came is on its way to the device, in the order of the stream."""
        super().wait(requests)
        for request in requests:
            assert isinstance(request, StagedRequest)
            if request.target is None:
                self.buffers.give(request.buffer)
            else:
                self._copies.copy_in(request.target, request.buffer[: request.target.nbytes])
                self.buffers.give_after_copy(request.buffer)

    def persistent(self, exchange: Round) -> PersistentRound:
        """A round whose arrays stay where they are."""
        return StagedRound(exchange, self)
