"""Symmetric memory: a window of device memory for every rank of a host, in which the kernels of all its ranks read and signal.

CUDA IPC handles are exchanged once through the transport; after that signals need neither it nor the host. See `cuda/p2p.cuh`.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from collectives.cuda.device import CuArray, Device, DeviceEntries
from collectives.cuda.environment import device_memory
from collectives.cuda.layouts import DIFFERS, MISSING, MOST_PEERS, RAISED, WindowHead
from collectives.errors import Caught, NoPeerMemoryError, refuse
from collectives.sparse import ENTRY
from collectives.transport import Transport

# windows that other ranks may map: freed by `close` alone, never by the garbage collector of one rank
_EXPORTED: set[cupy.cuda.Memory] = set()
_GRANULE = (
    2 << 20
)  # bytes: an IPC handle exports a whole allocation, and smaller ones share an allocation with other data

_ALIGNMENT = 256  # bytes; no access of a kernel is wider


def symmetric_memory_problem(transport: Transport, *, shared_gpus: bool = False) -> str:
    """Why the ranks cannot use symmetric memory, "" if nothing known speaks against it. Collective; the same on all ranks.

    Args:
        transport: of the ranks, each with its GPU current.
        shared_gpus: allow ranks to share a GPU. They then wait for each other in time slices of milliseconds; under MPS, which
            has no time slices, perhaps for ever.
    """
    gpu = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice())
    everyone = transport.allgather_objects((transport.ranks_on_this_host(), gpu))
    if any(count != transport.size for count, _ in everyone):
        return "the ranks are not all on one host"
    if transport.size > MOST_PEERS:
        return f"{transport.size} ranks are more than {MOST_PEERS}"
    if not shared_gpus and len({gpu for _, gpu in everyone}) < transport.size:
        return "ranks share a GPU"
    return ""


class SymmetricMemory:
    """One window a rank, mapped by all ranks.

    Args:
        comm: ranks of one host, each with its GPU current. Collective: every rank must call.
        device: the GPU and stream of this rank.
        nbytes: of payload in every window.

    Raises:
        NoPeerMemoryError: a window cannot be allocated or mapped; on every rank alike.

    Attributes:
        payload: bytes of payload in every window, at least `nbytes`.
        windows: device address of uint64[P], the address of each rank's window as this rank maps it.
        bases: the same addresses on the host.
        first: bytes from the start of a window to its payload.
        transport: for control operations; another one of the same ranks may take its place.

    Traffic: control: two allgathers, at construction only.
    """

    first = -(-ctypes.sizeof(WindowHead) // _ALIGNMENT) * _ALIGNMENT

    def __init__(self, transport: Transport, device: Device, nbytes: int) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.transport = transport
        self._device = device
        self._opened: list[int] = []
        self.bases: list[int] = []
        self._memory: Any = None
        handle = b""
        allocated = -(-(self.first + nbytes) // _GRANULE) * _GRANULE
        self.payload = allocated - self.first
        with Caught() as caught:
            with device.gpu:
                self._memory = device_memory(allocated)
                # for `abort`, when this rank's own kernels may wait
                self._aside = cupy.cuda.Stream(non_blocking=True)
            _EXPORTED.add(self._memory)
            device.zero(self._memory.ptr, self.first)
            device.synchronize()
            if self.size > 1:
                handle = cupy.cuda.runtime.ipcGetMemHandle(self._memory.ptr)
        everyone = transport.allgather_objects((caught.sentence, handle, device.epoch))
        try:
            with transport.together_or("no peer memory", NoPeerMemoryError):
                refuse(caught.sentence)
                if not any(reason for reason, _, _ in everyone):
                    # an aborted step may have left them apart
                    device.epoch = max(epoch for _, _, epoch in everyone)
                    self.bases = [self._map(rank, peer) for rank, (_, peer, _) in enumerate(everyone)]
                    self._table = device.allocate(self.size, np.uint64)
                    self._table.set(np.array(self.bases, np.uint64), stream=device.stream)
                    device.synchronize()
        except NoPeerMemoryError:
            self.close()
            raise
        self.windows = int(self._table.data.ptr)

    def entries(self, at: int, count: int) -> DeviceEntries:
        """ENTRY[count] of this rank's own window, `at` bytes from its start."""
        return DeviceEntries(self._device, self._memory.ptr + at, count, self._memory)

    def array(self, shape: int | tuple[int, ...], dtype: DTypeLike, at: int = 0) -> CuArray:
        """An array of CuPy in this rank's own payload, `at` bytes from its start. It keeps the memory after `close`."""
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(self._memory, self.first + at))

    def array_of(self, rank: int, shape: int | tuple[int, ...], dtype: DTypeLike, at: int = 0) -> CuArray:
        """As `array`, in the payload of any rank. Not to be used after `close`."""
        if rank == self.rank:
            return self.array(shape, dtype, at)
        nbytes = self.first + self.payload
        memory = cupy.cuda.UnownedMemory(self.bases[rank], nbytes, self, self._device.id)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, self.first + at))

    def abort(self, epoch: int) -> None:
        """End the waiting of all ranks' kernels from this epoch on; this rank must launch none after it. Not collective."""
        words = np.array([RAISED, epoch], np.uint32)
        at = WindowHead.reasons.offset + 4 * self.rank, WindowHead.aborted.offset  # in this order
        host_to_device = cupy.cuda.runtime.memcpyHostToDevice
        with self._device.gpu:
            for base in self.bases:
                for i, offset in enumerate(at):
                    source = words[i:].ctypes.data
                    cupy.cuda.runtime.memcpyAsync(base + offset, source, 4, host_to_device, self._aside.ptr)
            self._aside.synchronize()

    @property
    def aborted(self) -> bool:
        """Whether some rank has ended the waiting of this rank's kernels; waits for them."""
        self._device.synchronize()
        return bool(self.read(WindowHead.aborted.offset, 1)[0])

    def reasons(self) -> list[int]:
        """Why ranks are behind an abort, a word a rank, see `abort_reasons`."""
        return self.read(WindowHead.reasons.offset, self.size)

    def read(self, at: int, words: int) -> list[int]:
        """uint32[words] of this rank's window, `at` bytes from its start; waits for the device."""
        read = np.empty(words, np.uint32)
        device_to_host = cupy.cuda.runtime.memcpyDeviceToHost
        cupy.cuda.runtime.memcpy(read.ctypes.data, self._memory.ptr + at, read.nbytes, device_to_host)
        return read.tolist()

    def close(self) -> None:
        """Wait for all ranks' kernels, unmap the other ranks' windows and free this one's. Collective.

        After an abort it does not wait, since ranks may be missing, and leaves the memory to the end of the process.
        """
        if self.transport.gave_up:
            return
        if not self.bases:
            self._device.synchronize()
        elif self.aborted:
            return
        self.transport.barrier()
        for pointer in self._opened:
            cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened = []
        self.transport.barrier()  # free a window only when no rank maps it
        _EXPORTED.discard(self._memory)
        self._memory = None

    def _map(self, rank: int, handle: bytes) -> int:
        if rank == self.rank:
            return int(self._memory.ptr)
        pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle, cupy.cuda.runtime.cudaIpcMemLazyEnablePeerAccess)
        self._opened.append(pointer)
        return int(pointer)


class GrowingMemory:
    """Windows that are opened anew where larger ones are needed, until there is no memory.

    Args:
        transport, device: as SymmetricMemory.
        what: that lies in them, and travels as messages where there is no memory; for the warning.

    Attributes:
        memory: the windows; None before the first and where there is no memory.
    """

    def __init__(self, transport: Transport, device: Device, what: str) -> None:
        self._transport, self._device, self._what = transport, device, what
        self.memory: SymmetricMemory | None = None
        self._refused = False

    def open(self, nbytes: int) -> bool:
        """Open windows of at least so many bytes of payload in place of those there are, whose payload is lost. Collective.

        Returns:
            False where a window cannot be allocated or mapped, on every rank alike, and ever after; the first rank warns once.

        Raises:
            MissingRanksError: a rank did not come in time, where the caller has set a limit. It holds for the first operation:
                that all ranks have come. An error of one rank alone between later ones leaves the others waiting.
        """
        if self._refused:
            return False
        self.close()
        try:
            self.memory = SymmetricMemory(self._transport, self._device, nbytes)
        except NoPeerMemoryError as error:
            self._refused = True
            if self._transport.rank == 0:
                warnings.warn(f"{self._what} travel as messages, which is slower: {error}", stacklevel=2)
            return False
        return True

    def close(self) -> None:
        """Free the windows, if there are any. Collective."""
        if self.memory is not None:
            self.memory.close()
        self.memory = None


def abort_reasons(reasons: Sequence[int], timeout: float) -> str:
    """What the words of `WindowHead.reasons` mean, in a sentence."""
    texts = {
        MISSING: f"did not come within {timeout:g} s",
        RAISED: "raised an error of its own",
        DIFFERS: "made another call",
    }
    return "; ".join(f"rank {rank} {texts[reason]}" for rank, reason in enumerate(reasons) if reason)


def aligned(nbytes: int) -> int:
    """So many bytes, rounded up to the alignment of a window."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def entries_bytes(count: int) -> int:
    """Bytes of so many entries in a window, rounded up to its alignment."""
    return aligned(count * ENTRY.itemsize)
