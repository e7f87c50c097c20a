"""Peer memory: a window of device memory of every rank of a host, which the kernels of all its ranks read and signal in.

CUDA IPC handles are exchanged once through MPI. From then on what ranks tell each other needs neither MPI nor the host: see
`cuda/peer.cuh`, which has the layout of a window.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from collectives.cuda.device import Device, DeviceEntries
from collectives.cuda.environment import device_memory
from collectives.sparse import ENTRY
from collectives.transport import Transport

MOST_PEERS = 32
_NOTES, _SLOTS, _NOTE_WORDS, _MOST_DIGITS = 6, 3, 80, 2048
_HEAD = 4 * MOST_PEERS * (_NOTES + _SLOTS * _NOTE_WORDS + (_NOTES - _SLOTS) * _MOST_DIGITS)
_EXPORTED: set[Any] = (
    set()
)  # windows that others may have mapped: freed by `close` alone, never by a collector on one rank
_GRANULE = 2 << 20  # an IPC handle is of a whole allocation: smaller ones share theirs with strangers


def symmetric_memory_problem(transport: Transport, *, shared_gpus: bool = False) -> str:
    """Why the ranks cannot use peer memory, "" if they can as far as can be told. Collective; the same on all ranks.

    Args:
        transport: of the ranks, each with its GPU current.
        shared_gpus: also where ranks share a GPU: they wait for each other in turns of milliseconds, and under MPS, where there
            are no turns, perhaps for ever.
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
        transport: of ranks of one host, each with its GPU current. Collective: every rank must call.
        device: the GPU and stream of this rank.
        nbytes: of payload in every window.

    Raises:
        RuntimeError: a window cannot be had or mapped; on every rank alike, naming the ranks that could not.

    Attributes:
        windows: device address of uint64[P], the address of each rank's window as this rank maps it.
        first: bytes from the start of a window to its payload.

    Traffic: control: two allgathers, at construction only.
    """

    first = _HEAD

    def __init__(self, transport: Transport, device: Device, nbytes: int) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._device = device
        self._opened: list[int] = []
        self._memory: Any = None
        handle, problem = b"", ""
        try:
            self._memory = device_memory(-(-(self.first + nbytes) // _GRANULE) * _GRANULE)
            _EXPORTED.add(self._memory)
            device.zero(self._memory.ptr, self.first)
            device.synchronize()
            if self.size > 1:
                handle = cupy.cuda.runtime.ipcGetMemHandle(self._memory.ptr)
        except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
            problem = str(error)
        everyone = transport.allgather_objects((problem, handle))
        if not any(theirs for theirs, _ in everyone):
            try:
                bases = [self._map(rank, theirs) for rank, (_, theirs) in enumerate(everyone)]
                self._table = device.allocate(self.size, np.uint64)
                self._table.set(np.array(bases, np.uint64), stream=device.stream)
                device.synchronize()
            except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
                problem = str(error)
        problems = transport.allgather_objects(problem)
        if any(problems):
            self.close()
            named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
            raise RuntimeError(f"no peer memory: {named}")
        self.windows = int(self._table.data.ptr)

    def entries(self, at: int, count: int) -> DeviceEntries:
        """ENTRY[count] of this rank's own window, `at` bytes from its start."""
        return DeviceEntries(self._device, self._memory.ptr + at, count, self._memory)

    def close(self) -> None:
        """Unmap the other ranks' windows and free this one's, once all ranks' kernels are done with them. Collective."""
        self._device.synchronize()
        self._transport.barrier()
        for pointer in self._opened:
            cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened = []
        self._transport.barrier()  # a window is freed when nobody maps it any more
        _EXPORTED.discard(self._memory)
        self._memory = None

    def _map(self, rank: int, handle: bytes) -> int:
        if rank == self.rank:
            return int(self._memory.ptr)
        pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle, cupy.cuda.runtime.cudaIpcMemLazyEnablePeerAccess)
        self._opened.append(pointer)
        return int(pointer)


def entries_bytes(count: int) -> int:
    """Bytes that so many entries take in a window, up to the next 256."""
    return -(-count * ENTRY.itemsize // 256) * 256
