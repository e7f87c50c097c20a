"""A device whose memory is ordinary memory that MPI must never be given, and whose stream runs as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.mpi import MpiTransport
from collectives.staging import StagedTransport, StagingBuffers
from oktopk.backend import Backend
from oktopk.cpu import kernels as gradient_kernels

POISON = 0xA5


class LateStream:
    """Copies that are done when the stream is waited for, or when a kernel comes after them, and not before.

    Whoever reads a buffer too early, or writes to one too early, gets it wrong every time.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.pending = False
        self.waits = 0
        self.pinned_memory: list[NDArray[np.uint8]] = []

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self.pinned_memory.append(np.full(nbytes, POISON, np.uint8))
        return self.pinned_memory[-1]

    def copy_out(self, host: NDArray[np.uint8], array: Any) -> None:
        assert len(host) == array.nbytes
        assert self.is_pinned(host)
        self._put(lambda: np.copyto(host, array.view(np.uint8)))

    def copy_in(self, array: Any, host: NDArray[np.uint8]) -> None:
        assert len(host) == array.nbytes
        assert self.is_pinned(host)
        self._put(lambda: np.copyto(array.view(np.uint8), host))

    def synchronize(self) -> None:
        self.run()
        self.waits += 1
        self.pending = False

    def run(self) -> None:
        """The device gets to it; the host does not know."""
        for copy in self.waiting:
            copy()
        self.waiting.clear()

    def is_pinned(self, array: NDArray[Any]) -> bool:
        return not array.size or any(np.shares_memory(array, memory) for memory in self.pinned_memory)

    def _put(self, copy: Callable[[], None]) -> None:
        self.pending = True
        self.waiting.append(copy)


class InOrder:
    """Kernels that run after what was put on the stream before them."""

    def __init__(self, kernels: ModuleType, stream: LateStream) -> None:
        self._kernels = kernels
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        if not callable(found):
            return found

        def launch(*arguments: Any, **named: Any) -> Any:
            self._stream.run()
            return found(*arguments, **named)

        return launch


class PoisonedBuffers(StagingBuffers):
    """A buffer that was handed back holds nothing."""

    def give(self, buffer: NDArray[np.uint8]) -> None:
        buffer[:] = POISON
        super().give(buffer)


class FakeDevice(StagedTransport):
    """Staging on the double; mixed into the transport of a library."""

    def __init__(self, comm: Any, stream: LateStream | None = None) -> None:
        self.stream = stream or LateStream()
        super().__init__(comm, self.stream)
        self.buffers = PoisonedBuffers(self.stream)
        self.kernels = InOrder(host_kernels, self.stream)

    def _like_this(self, comm: Any) -> Any:
        return type(self)(comm, self.stream)


class FakeDeviceTransport(FakeDevice, MpiTransport):
    """Watched: whatever MPI gets is pinned."""

    def _mpi_buffer(self, array: NDArray[Any]) -> Any:
        assert self.stream.is_pinned(array), "MPI was given device memory"
        return super()._mpi_buffer(array)


class StagedBackend(Backend):
    """The library's host kernels, on the double."""

    def __init__(self) -> None:
        self.stream = LateStream()
        self.kernels = InOrder(gradient_kernels, self.stream)

    def connect(self, host: Any) -> MpiTransport:
        return FakeDeviceTransport(host.comm, self.stream)

    def to_host(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        self.stream.run()
        return array.copy()
