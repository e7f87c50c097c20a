"""What the library uses of CuPy, on the host: memory that others can map, streams that run at once, graphs that replay."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from tests.host_cuda.modules import HostKernel, compile_module

GPUS = 8  # one a rank, so that ranks take each other for peers
PROCESSORS = 4
SHARED = 2 << 20  # bytes of the smallest memory that others may map: a file each

POISON = 0xA5

_captures: dict[int, list[Callable[[], None]]] = {}  # by stream: what is put on it while it is captured
_streams = itertools.count(1)
_opened: dict[int, mmap.mmap] = {}
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
_stream_gpus: dict[int, int] = {}


class _Current(threading.local):
    """The GPU that is the current one in this thread, and those before it."""

    def __init__(self) -> None:
        self.gpu = 0
        self.before: list[int] = []


_current = _Current()


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


class Memory:
    """So many bytes; another process can map them if they are many."""

    def __init__(self, nbytes: int) -> None:
        self.size = nbytes
        self.device_id = _current.gpu
        self._file = -1
        if nbytes >= SHARED:
            self._file = os.memfd_create("host-cuda")
            os.ftruncate(self._file, nbytes)
        self.block = mmap.mmap(self._file, max(nbytes, 1))
        np.frombuffer(self.block, np.uint8).fill(POISON)  # what nobody wrote is not zero on a GPU either
        self.ptr = _address(self.block)
        _memories[self.ptr] = self

    @property
    def handle(self) -> bytes:
        """How another process finds it, while this one lives."""
        if self._file < 0:
            raise CUDARuntimeError(1)  # cudaErrorInvalidValue
        return f"{os.getpid()} {self._file}".encode()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class UnownedMemory:
    """Memory that another object holds."""

    def __init__(self, pointer: int, nbytes: int, owner: Any, device_id: int) -> None:
        self.ptr, self.size, self.device_id, self._owner = pointer, nbytes, device_id, owner
        self.block = (ctypes.c_char * nbytes).from_address(pointer)


class MemoryPointer:
    """A place in memory."""

    def __init__(self, memory: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = memory, memory.ptr + offset, memory.device_id


class Array(np.ndarray):
    """cupy.ndarray."""

    def __new__(cls, shape: Any, dtype: Any = np.float64, memptr: MemoryPointer | None = None) -> Self:
        count = int(np.prod(shape))
        memory = memptr.mem if memptr is not None else Memory(count * np.dtype(dtype).itemsize)
        offset = 0 if memptr is None else memptr.ptr - memory.ptr
        made = np.frombuffer(memory.block, dtype, count, offset).reshape(shape).view(cls)
        made._memory = memory
        return made

    def __array_finalize__(self, made_of: Any) -> None:
        self._memory = getattr(made_of, "_memory", None)

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Where it lies."""
        return SimpleNamespace(
            ptr=self.ctypes.data, device_id=_current.gpu if self._memory is None else self._memory.device_id
        )

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The GPU that it lies on."""
        return SimpleNamespace(id=self.data.device_id)

    def set(self, host: NDArray[Any], stream: Any = None) -> None:
        """Copy from the host."""
        np.copyto(self.view(np.ndarray), host)

    def get(self, stream: Any = None) -> NDArray[Any]:
        """A copy on the host."""
        return np.array(self.view(np.ndarray))


def asarray(host: Any) -> Array:
    """A copy on the device."""
    if isinstance(host, Array):
        return host
    host = np.asarray(host)
    made = Array(host.shape, host.dtype)
    made.set(host)
    return made


class Stream:
    """All that is put on it is done at once, unless it is captured."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0 if null else next(_streams)
        self.gpu = None if null else _current.gpu

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def wait_event(self, event: Event) -> None:
        """It is over."""

    def begin_capture(self, mode: int = 0) -> None:
        """From here on note what is put here, and do nothing."""
        _captures[self.ptr] = []

    def end_capture(self) -> Graph:
        """What was noted."""
        return Graph(_captures.pop(self.ptr))


class Graph:
    """Work that was captured."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._work = work

    def launch(self, stream: Stream) -> None:
        """Do it again."""
        for each in self._work:
            each()


_null = Stream(null=True)


def _put(stream: int, work: Callable[[], None]) -> None:
    if stream in _captures:
        _captures[stream].append(work)
    else:
        work()


class Event:
    """A moment, on streams of the GPU that was the current one when it was made."""

    _by_number: ClassVar[weakref.WeakValueDictionary[int, Event]] = weakref.WeakValueDictionary()

    def __init__(self, disable_timing: bool = False) -> None:
        self.ptr = id(self)
        self.seconds = 0.0
        self._gpu = _current.gpu
        Event._by_number[self.ptr] = self

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        if stream is not None and stream.gpu not in (None, self._gpu):
            raise CUDARuntimeError(400)  # cudaErrorInvalidResourceHandle
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It is over."""


class Device:
    """One of GPUS that are not there."""

    def __init__(self, number: int | None = None) -> None:
        self.id = _current.gpu if number is None else number
        self.attributes = {"MultiProcessorCount": PROCESSORS}
        self.compute_capability = "90"

    def use(self) -> None:
        """Make it the current one."""
        if not 0 <= self.id < GPUS:
            raise CUDARuntimeError(101)  # cudaErrorInvalidDevice
        _current.gpu = self.id

    def __enter__(self) -> Self:
        _current.before.append(_current.gpu)
        self.use()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.gpu = _current.before.pop()


class RawModule:
    """A source."""

    def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
        self._module = compile_module(code, options)

    def get_function(self, name: str) -> Any:
        """A kernel as `collectives.cuda.launch` takes it."""
        _kernels.append(self._module.kernel(name))
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(_kernels) - 1))


_kernels: list[HostKernel] = []


def launch(function: int, blocks: int, rows: int, _: int, threads: int, *more: Any) -> int:
    """cuLaunchKernel. `more`: the block's other sides, shared memory, the stream, where the arguments lie, extra."""
    *_sides, stream, places, _extra = more
    kernel = _kernels[function]
    if len(places) != kernel.arguments:
        raise TypeError(f"{kernel.name} takes {kernel.arguments} arguments, not {len(places)}")
    if not blocks or not rows or not threads:
        return 1  # CUDA_ERROR_INVALID_VALUE
    if stream not in _captures:
        return kernel.run(blocks, rows, threads, places)
    values = [
        ctypes.create_string_buffer(ctypes.string_at(places[i], size), size)
        for i, size in enumerate(kernel.sizes)
    ]
    kept = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    def again(alive: Any = values) -> None:
        if status := kernel.run(blocks, rows, threads, kept):
            raise RuntimeError(f"{kernel.name}: CUDA error {status}")

    _captures[stream].append(again)
    return 0


def _memcpy_async(dest: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    _put(stream, lambda: ctypes.memmove(dest, source, nbytes) and None)


def _memset_async(pointer: int, value: int, nbytes: int, stream: int) -> None:
    _put(stream, lambda: ctypes.memset(pointer, value, nbytes) and None)


def _event_record(event: int, stream: int) -> None:
    _put(stream, Event._by_number[event].record)


def _open_handle(handle: bytes, flags: int) -> int:
    process, number = handle.split()
    file = os.open(f"/proc/{process.decode()}/fd/{number.decode()}", os.O_RDWR)
    try:
        block = mmap.mmap(file, 0)
    finally:
        os.close(file)
    pointer = _address(block)
    _opened[pointer] = block
    return pointer


def _joined(value: Any, attribute: int, gpu: int, other: int) -> int:
    """cuDeviceGetP2PAttribute: all that NVLink can."""
    value._obj.value = 1
    return 0


def _create_stream(stream: Any, flags: int, priority: int) -> int:
    """cuStreamCreateWithPriority."""
    stream._obj.value = address = next(_streams)
    _stream_gpus[address] = _current.gpu
    return 0


def _external(address: int) -> Stream:
    """A stream by its address."""
    made = Stream()
    made.ptr, made.gpu = address, _stream_gpus.get(address)
    return made


class Pinned(bytearray):
    """Page-locked memory."""

    @property
    def ptr(self) -> int:
        """Its address."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def _copied(make: Callable[..., Any]) -> Callable[..., Array]:
    """A function of NumPy's whose results lie on the device."""

    def made(*arguments: Any) -> Array:
        return asarray(np.ascontiguousarray(make(*map(_on_host, arguments))))

    return made


def _on_host(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, Array) else array


def installed() -> bool:
    """Whether `cupy` is this module's."""
    return "cupy" in sys.modules and getattr(sys.modules["cupy"], "on_host", False)


def install() -> None:
    """Be `cupy` for this process, and the driver that launches kernels; before the library looks for either."""
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        cudaIpcMemLazyEnablePeerAccess=1,
        streamCaptureModeRelaxed=2,
        memcpy=lambda dest, source, nbytes, kind: ctypes.memmove(dest, source, nbytes),
        memcpyAsync=_memcpy_async,
        memset=ctypes.memset,
        memsetAsync=_memset_async,
        eventRecord=_event_record,
        streamQuery=lambda stream: 0,
        getDevice=lambda: _current.gpu,
        getDeviceCount=lambda: GPUS,
        deviceGetPCIBusId=lambda number: f"0000:{number:02x}:00.0",
        deviceGetByPCIBusId=lambda text: int(text[5:7], 16),
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        memGetInfo=lambda: (1 << 33, 1 << 33),
        ipcGetMemHandle=lambda pointer: _memories[pointer].handle,
        ipcOpenMemHandle=_open_handle,
        ipcCloseMemHandle=lambda pointer: _opened.pop(pointer) and None,
    )
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        runtime=runtime,
        Device=Device,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory,
        Stream=Stream,
        ExternalStream=_external,
        Event=Event,
        get_current_stream=lambda: _null,
        get_elapsed_time=lambda begin, end: 1e3 * (end.seconds - begin.seconds),
        alloc_pinned_memory=Pinned,
    )
    cupy.ndarray, cupy.RawModule, cupy.asarray = Array, RawModule, asarray
    cupy.asnumpy = lambda array, stream=None: array.get()
    cupy.empty = lambda shape, dtype=np.float64: Array(shape, dtype)
    for name in ("ones", "zeros", "flatnonzero", "searchsorted", "partition"):
        setattr(cupy, name, _copied(getattr(np, name)))
    cupy.ascontiguousarray = lambda array: array if array.flags.c_contiguous else asarray(array.get())
    cupy.count_nonzero = np.count_nonzero
    cupy.argsort = _copied(lambda array: np.argsort(array, kind="stable"))
    cupy.on_host = True
    sys.modules["cupy"] = cupy

    from collectives.cuda import launch as launches

    driver = SimpleNamespace(
        cuLaunchKernel=launch,
        cuStreamGetPriority=lambda stream, priority: 0,
        cuStreamCreateWithPriority=_create_stream,
        cuDeviceGetP2PAttribute=_joined,
    )
    launches._driver = lambda: driver  # type: ignore[assignment]
