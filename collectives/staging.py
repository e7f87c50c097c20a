"""Device arrays over a library that moves host memory only: through pinned buffers.

What is sent is copied out on the stream, which is waited for; what arrives is copied in on the stream when it is waited
for. The library never gets a device address. Imports without a GPU: the copies are the device's.

Long arrays travel in three parts where all ranks stage: the first part is sent while the others are copied out, and the others
are copied in while the last part arrives. So a link waits for copies of two short parts only.
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
_WHOLE = 1 << 20  # bytes up to which an array travels in one part
_END = 1 << 18  # bytes of the first and the last part: 10 Gb/s take longer for them than PCIe for 4 MB
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

    def mark(self) -> Any:
        """A mark on the stream, after everything that is on it."""

    def reach(self, mark: Any) -> None:
        """Wait until the stream has done what is before a mark."""

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


class _Copy(NamedTuple):
    """A device array on its way out: its buffer, and the mark after its first part, None where it has one."""

    buffer: NDArray[np.uint8]
    mark: Any


class _StagedRequest(NamedTuple):
    """The library's requests for a pinned buffer, and the device array that a receive fills (None for a send).

    Those in `early` fill the first `cut` bytes.
    """

    early: list[Any]
    last: list[Any]
    cut: int
    buffer: NDArray[np.uint8]
    target: Any


class StagedTransport(HostTransport):
    """Device arrays through pinned host memory; mixed into the transport of a library.

    Args:
        comm: as the library's transport. Collective.
        copies: the device.

    Attributes:
        buffers: the pinned memory.
        in_parts: whether long arrays travel in parts; equal on all ranks, so that all of them must stage.
    """

    def __init__(self, comm: Any, copies: Copies) -> None:
        library: Any = super()
        library.__init__(comm)
        self.buffers = StagingBuffers(copies)
        self.in_parts = False
        self._copies = copies
        self._prepared: dict[int, tuple[Any, _Copy]] = {}  # by the id of the array, which they keep alive

    def split(self, color: int | None) -> HostTransport | None:
        part = super().split(color)
        if isinstance(part, StagedTransport):
            part.in_parts = self.in_parts
        return part

    def send(self, array: Any, dest: int, even_if_empty: bool = False) -> list[Any]:
        return self.send_all([(array, dest)], even_if_empty)

    def prepare_sends(self, arrays: Sequence[Any]) -> None:
        """Put the copies out on the stream. Arrays that are not sent after all keep their buffers until the next call."""
        for _, copy in self._prepared.values():
            self.buffers.give_after_copy(copy.buffer)
        self._prepared = {
            id(array): (array, self._copy_out(array, self._cuts(array))) for array in arrays if array.size
        }

    def _cuts(self, array: Any) -> tuple[int, int] | None:
        """Bytes at which the second and the third part of an array begin; None where it travels in one."""
        return (_END, array.nbytes - _END) if self.in_parts and array.nbytes > _WHOLE else None

    def _copy_out(self, array: Any, cuts: tuple[int, int] | None) -> _Copy:
        buffer = self.buffers.take(array.nbytes)
        if cuts is None:
            self._copies.copy_out(buffer[: array.nbytes], array)
            return _Copy(buffer, None)
        self._copies.copy_out(buffer[: cuts[0]], array[: cuts[0] // array.itemsize])
        mark = self._copies.mark()
        self._copies.copy_out(buffer[cuts[0] : array.nbytes], array[cuts[0] // array.itemsize :])
        return _Copy(buffer, mark)

    def send_all(self, messages: Sequence[tuple[Any, int]], even_if_empty: bool = False) -> list[Any]:
        library: Any = super()
        staged = []
        for array, dest in messages:
            if array.size or even_if_empty:
                # a receiver that does not know the length expects one message
                cuts = None if even_if_empty else self._cuts(array)
                _, copy = self._prepared.pop(id(array), (None, None))
                if copy is None:
                    copy = self._copy_out(array, cuts) if array.size else _Copy(self.buffers.take(0), None)
                staged.append((copy, cuts, array.nbytes, dest))
        requests = []
        for (buffer, mark), cuts, nbytes, dest in staged:
            first, second = cuts or (0, 0)
            sent: list[Any] = []
            if cuts:
                self._copies.reach(mark)
                sent += library.send(buffer[:first], dest)
            self.buffers.synchronize()
            if cuts:
                sent += library.send(buffer[first:second], dest)
            sent += library.send(buffer[second:nbytes], dest, even_if_empty)
            # they are parts of one message
            self.traffic.messages -= 2 * bool(cuts)
            requests.append(_StagedRequest([], sent, 0, buffer, None))
        return requests

    def receive(self, array: Any, source: int) -> list[Any]:
        if not array.size:
            return []
        library: Any = super()
        buffer = self.buffers.take(array.nbytes)
        cuts = self._cuts(array)
        first, second = cuts or (0, 0)
        early = []
        if cuts:
            early = library.receive(buffer[:first], source) + library.receive(buffer[first:second], source)
        last = library.receive(buffer[second : array.nbytes], source)
        return [_StagedRequest(early, last, second, buffer, array)]

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
        parted = [staged for staged in requests if staged.early]
        if parted:
            library.wait([request for staged in parted for request in staged.early])
        for _, _, cut, buffer, target in parted:
            self._copies.copy_in(target[: cut // target.itemsize], buffer[:cut])
        library.wait([request for staged in requests for request in staged.last])
        for _, _, cut, buffer, target in requests:
            if target is None:
                self.buffers.give(buffer)
            else:
                rest = target[cut // target.itemsize :] if cut else target
                self._copies.copy_in(rest, buffer[cut : target.nbytes])
                self.buffers.give_after_copy(buffer)

    def persistent(self, exchange: Round) -> PersistentRound:
        return Transport.persistent(self, exchange)  # no requests of the library on device arrays
