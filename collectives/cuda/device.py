"""One GPU for one instance: its stream, plain device memory, and reports in pinned memory.

Communication buffers come from plain cudaMalloc: memory from an asynchronous or expandable pool has no CUDA IPC handle,
and MPI would stage it through the host.
"""

from __future__ import annotations

import ctypes
import time
from functools import cached_property
from typing import Any, TypeAlias

import cupy
import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives.cuda.environment import device_memory, pinned_memory
from collectives.cuda.launch import Kernel, stream_of_priority, stream_priority
from collectives.cuda.layouts import Scan
from collectives.sparse import ENTRY
from collectives.workspace import Workspace

_SPINS, _NAP = 50_000, 2e-5  # polls (some milliseconds), then seconds of sleep between two polls
_RUNNING = 600  # cudaErrorNotReady
_NO_REPORT: tuple[Any, NDArray[np.uint32]] = None, np.empty(0, np.uint32)

CuArray: TypeAlias = "cupy.ndarray"
Stream: TypeAlias = "cupy.cuda.Stream | cupy.cuda.ExternalStream"


class DeviceEntries:
    """ENTRY[n] in device memory, with the slices and copies of a NumPy array of entries.

    Attributes:
        pointer: device address.
        size: entries.
    """

    __slots__ = ("_device", "_owner", "pointer", "size")
    itemsize = ENTRY.itemsize
    dtype = ENTRY

    def __init__(self, device: Device, pointer: int, size: int, owner: object) -> None:
        self._device = device
        self._owner = owner  # keeps the memory alive
        self.pointer = pointer
        self.size = size

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def _slice(self, key: slice) -> tuple[int, int]:
        start, stop, step = key.indices(self.size)
        if step != 1:
            raise ValueError(f"step {step} of a slice of entries is not 1")
        return self.pointer + start * self.itemsize, max(0, stop - start)

    def __getitem__(self, key: slice) -> DeviceEntries:
        pointer, size = self._slice(key)
        return DeviceEntries(self._device, pointer, size, self._owner)

    def __setitem__(self, key: slice, entries: DeviceEntries) -> None:
        """Copy on the stream; returns before it is done."""
        pointer, size = self._slice(key)
        if size != entries.size:
            raise ValueError(f"{entries.size} entries do not fit a slice of {size}")
        if size and pointer != entries.pointer:
            self._device.copy(pointer, entries.pointer, size * self.itemsize)

    def get(self) -> NDArray[np.void]:
        """A copy on the host."""
        host = np.empty(self.size, ENTRY)
        if self.size:
            self._device.synchronize()
            cupy.cuda.runtime.memcpy(
                host.ctypes.data, self.pointer, self.nbytes, cupy.cuda.runtime.memcpyDeviceToHost
            )
        return host


class Device:
    """The current GPU, on one stream. Memory is taken there whatever GPU is the current one later.

    Args:
        stream: the cupy stream that all work is ordered on; None: the current one.

    Attributes:
        gpu: as a context, within which it is the current one.
    """

    def __init__(self, stream: Stream | None = None) -> None:
        self.gpu = cupy.cuda.Device(cupy.cuda.Device().id)
        self.id = self.gpu.id
        self.stream = stream or cupy.cuda.get_current_stream()
        self._stream = self.stream.ptr
        self.processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
        self.pending = False
        """Whether work was put on the stream since the last wait for it."""
        self._reports: dict[str, tuple[Any, NDArray[np.uint32]]] = {}
        self._viewed: set[str] = set()
        self._memory: dict[str, cupy.ndarray] = {}
        # (Scan, blocks that it is large enough for, memory)
        self._scans: dict[str, tuple[Scan, int, cupy.ndarray]] = {}
        self.epoch = 0
        """Of the last signals and look-backs."""
        self._tables: dict[bytes, cupy.ndarray] = {}

    @cached_property
    def priority(self) -> int:
        """Of the stream; below 0 it works beside other streams, and before them."""
        return stream_priority(self._stream)

    @cached_property
    def capturing(self) -> cupy.cuda.Stream:
        """A stream to capture graphs on, whose kernels keep its priority: that of `stream`."""
        with self.gpu:
            return stream_of_priority(self.priority)

    def allocate(self, count: int, dtype: DTypeLike) -> CuArray:
        """cupy array [count] of plain cudaMalloc memory, contents undefined."""
        nbytes = max(1, count) * np.dtype(dtype).itemsize
        with self.gpu:
            return cupy.ndarray((count,), dtype, memptr=cupy.cuda.MemoryPointer(device_memory(nbytes), 0))

    def scratch(self, name: str, count: int, dtype: DTypeLike) -> CuArray:
        """cupy array [>= count] that outlives the call, zeroed when allocated."""
        array = self._memory.get(name)
        if array is None or array.size < count:
            array = self.allocate(max(count, 0 if array is None else array.size * 3 // 2), dtype)
            with self.gpu, self.stream:
                array.fill(0)
            self._memory[name] = array
        return array

    def report(self, name: str, words: int) -> NDArray[np.uint32]:
        """uint32[words] in pinned memory, which kernels write into; read it after `synchronize`, and do not keep it: use `view`.

        Raises:
            RuntimeError: the report is viewed and has fewer words; growing would leave the view behind.
        """
        memory, report = self._reports.get(name, _NO_REPORT)
        if memory is None or len(report) < words:
            if name in self._viewed:
                raise RuntimeError(
                    f"report {name!r} is viewed and cannot grow from {len(report)} to {words} words"
                )
            with self.gpu:
                memory = cupy.cuda.alloc_pinned_memory(4 * words)
            report = np.frombuffer(memory, np.uint32, words)
            report[:] = 0
            self._reports[name] = memory, report
        return report

    def view(self, name: str, kind: Any) -> Any:
        """A report as a ctypes object of this kind, which stays where it is; a slice costs a fraction of NumPy's."""
        self.report(name, -(-ctypes.sizeof(kind) // 4))
        self._viewed.add(name)
        return kind.from_address(self.address(name))

    def address(self, name: str) -> int:
        """The address of a report."""
        return int(self._reports[name][0].ptr)

    def scan(self, name: str, tiles: int) -> Scan:
        """Scan for a launch of so many blocks: the look-back state of compact.cuh."""
        scan, room, _ = self._scans.get(name, (None, 0, None))
        if scan is None or room < tiles or scan.epoch >= 2**29:
            room = max(tiles, room * 3 // 2)
            memory = self.allocate(2 * room + 1, np.uint64)
            with self.gpu, self.stream:
                memory.fill(0)
            base = memory.data.ptr
            scan = Scan(status=base, tie_status=base + 8 * room, ticket=base + 16 * room)
            self._scans[name] = scan, room, memory
        scan.epoch += 1
        return scan

    def next_epoch(self) -> int:
        """The next number of signals and look-backs, in 32 bits: none returns while kernels may still read an old one."""
        self.epoch = (self.epoch + 1) & 0xFFFFFFFF
        return self.epoch

    def launch(self, kernel: Kernel, blocks: int, threads: int, *, rows: int = 1, **fields: Any) -> None:
        """Put a kernel on the stream, with these parameters."""
        self.pending = True
        kernel.launch(blocks, threads, self._stream, rows, fields)

    def launch_for(self, kernel: Kernel, elements: int, **fields: Any) -> None:
        """Put a grid-stride kernel on the stream, over so many elements: its parameter `n`, unless that is given."""
        if elements:
            fields.setdefault("n", elements)
            self.launch(kernel, min(-(-elements // 256), 16 * self.processors), 256, **fields)

    def copy(self, dest: int, source: int, nbytes: int) -> None:
        """Copy within device memory, on the stream."""
        self._copy(dest, source, nbytes, cupy.cuda.runtime.memcpyDeviceToDevice)

    def upload(self, dest: int, array: NDArray[Any]) -> None:
        """Copy a small array to device memory, on the stream; the array may be changed at once.

        It must not be in pinned memory: CUDA copies other memory before this returns (above 64 KiB it may wait for the stream).
        """
        self._copy(dest, array.ctypes.data, array.nbytes, cupy.cuda.runtime.memcpyHostToDevice)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """uint8[nbytes] of page-locked host memory; this and the next two are the `Copies` of `collectives.staging`."""
        return np.frombuffer(pinned_memory(nbytes), np.uint8, nbytes)

    def copy_out(self, host: NDArray[np.uint8], array: CuArray | DeviceEntries) -> None:
        self._copy(host.ctypes.data, address_of(array), len(host), cupy.cuda.runtime.memcpyDeviceToHost)

    def copy_in(self, array: CuArray | DeviceEntries, host: NDArray[np.uint8]) -> None:
        self._copy(address_of(array), host.ctypes.data, len(host), cupy.cuda.runtime.memcpyHostToDevice)

    def _copy(self, dest: int, source: int, nbytes: int, kind: int) -> None:
        self.pending = True
        cupy.cuda.runtime.memcpyAsync(dest, source, nbytes, kind, self._stream)

    def zero(self, pointer: int, nbytes: int) -> None:
        """Zero device memory, on the stream."""
        self.pending = True
        cupy.cuda.runtime.memsetAsync(pointer, 0, nbytes, self.stream.ptr)

    def post(self, name: str, array: NDArray[np.int64]) -> int:
        """Write a small array to pinned memory, where kernels can read it; returns the address.

        The caller waits for the stream before it posts under the same name again.
        """
        words = self.report(f"post {name}", 2 * len(array))
        words.view(np.int64)[: len(array)] = array
        return self.address(f"post {name}")

    def table(self, array: NDArray[Any]) -> int:
        """A small constant array in device memory, copied there once; returns its address."""
        key = array.tobytes()
        if key not in self._tables:
            with self.gpu, self.stream:
                self._tables[key] = cupy.asarray(array)
        return int(self._tables[key].data.ptr)

    def watch(self, words: Any, at: int, epoch: int) -> None:
        """Wait until a kernel on the stream has posted words[at] of 64 bits, in pinned memory, for this epoch.

        Raises:
            RuntimeError: a kernel failed, or all ended without posting it.
        """
        spins = 0
        while words[at] >> 32 != epoch:
            spins += 1
            if spins < _SPINS:
                continue
            time.sleep(_NAP)  # a rank is late: let other threads run
            state = cupy.cuda.runtime.streamQuery(self.stream.ptr)
            if state == _RUNNING or words[at] >> 32 == epoch:
                continue
            raise RuntimeError(
                "the kernels of a step ended without reporting"
                if state == 0
                else f"a kernel of a step failed: CUDA error {state}"
            )

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self.stream.synchronize()
        self.pending = False


class DeviceWorkspace(Workspace):
    """Named device buffers."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def _allocate(self, count: int) -> DeviceEntries:
        memory = self._device.allocate(count, np.uint64)
        return DeviceEntries(self._device, memory.data.ptr, count, memory)

    def set_buffer(self, name: str, entries: DeviceEntries) -> None:
        """Use these entries as the buffer of that name, until more are asked for."""
        self._buffers[name] = entries


def address_of(array: CuArray | DeviceEntries) -> int:
    """Device address of a cupy array or of entries."""
    return int(array.pointer if isinstance(array, DeviceEntries) else array.data.ptr)
