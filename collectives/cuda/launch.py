"""Compiled kernels and their launches, which cost the host a third of CuPy's: a pointer to one struct goes to the driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy

from collectives.cuda.layouts import PARAMETERS, Struct, source_with_layouts

_HEADERS = Path(__file__).parent
_CODES: dict[Any, str] = {
    ctypes.c_float: "f",
    ctypes.c_double: "d",
    ctypes.c_int32: "i",
    ctypes.c_uint32: "I",
    ctypes.c_int64: "q",
    ctypes.c_uint64: "Q",
}  # of module struct


@functools.cache
def compiled(source: Path, *defines: str) -> cupy.RawModule:
    """A `.cu` file compiled for the current device, once a process.

    Args:
        source: the file; it finds headers beside it and those of `collectives/cuda`.
        defines: NAME=VALUE for the preprocessor.
    """
    folders = (_HEADERS, source.parent)
    headers = b"".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.cuh")))
    # CuPy caches by source and options alone: without this it would not see a changed header
    digest = f"HEADERS=0x{hashlib.sha256(headers).hexdigest()[:8]}"
    includes = (f"-I{folder}" for folder in folders)
    options = ("-std=c++17", *includes, *(f"-D{define}" for define in (*defines, digest)))
    return cupy.RawModule(code=source_with_layouts(source), options=options)


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    sizes = [ctypes.c_uint] * 7
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, *[ctypes.c_void_p] * 3]
    return library


def stream_priority(stream: int) -> int:
    """The priority of a stream by its address: 0, or less where its work goes before that of other streams."""
    priority = ctypes.c_int()
    _check(
        _driver().cuStreamGetPriority(ctypes.c_void_p(stream), ctypes.byref(priority)), "cuStreamGetPriority"
    )
    return priority.value


def has_native_atomics(gpu: int, other: int) -> bool:
    """Whether a GPU's atomic operations on the memory of another one are the link's own, as NVLink's are and PCIe's are not."""
    value, attribute = ctypes.c_int(), 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    status = _driver().cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, gpu, other)
    return status == 0 and value.value == 1


def stream_of_priority(priority: int) -> cupy.cuda.ExternalStream:
    """A cupy stream of that priority, which waits for no other one; it lives as long as the process."""
    stream, non_blocking = ctypes.c_void_p(), 1
    status = _driver().cuStreamCreateWithPriority(ctypes.byref(stream), non_blocking, priority)
    _check(status, "cuStreamCreateWithPriority")
    return cupy.cuda.ExternalStream(stream.value)


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call}: CUDA error {status}")


class Kernel:
    """One kernel of a module.

    Attributes:
        name: in the source.
        parameters: the struct that it takes.
        function: the driver's handle.
    """

    def __init__(self, module: cupy.RawModule, name: str) -> None:
        self.name = name
        self.parameters = PARAMETERS[name]
        self._raw = module.get_function(name)  # keeps the module loaded
        self.function = self._raw.kernel.ptr
        self._fields, self._nested, self._unset, self._pack = packing(self.parameters)
        self._reused = self.prepare()

    def prepare(self, **fields: Any) -> PreparedLaunch:
        """A launch with these parameters; the others are 0."""
        return PreparedLaunch(self, self.parameters(**fields))

    def launch(self, blocks: int, threads: int, stream: int, rows: int, fields: dict[str, Any]) -> None:
        """Put the kernel on a stream once, with these parameters; the others are 0. Empties `fields`.

        Raises:
            TypeError: the kernel's struct has no such field.
        """
        for name in self._nested:
            fields[name] = bytes(fields.get(name, b""))
        # one call writes all fields, where an assignment to each costs 2 us more
        self._pack(self._reused.params, 0, *map(fields.pop, self._fields, self._unset))
        if fields:
            raise TypeError(f"{self.parameters.__name__} has no field {', '.join(fields)}")
        self._reused(blocks, threads, stream, rows)


@functools.cache
def packing(
    kind: type[Struct],
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...], Callable[..., None]]:
    """How to write all fields of a struct at once.

    Returns:
        The fields' names; those that are structs and written as bytes; the value of each field that is unset; and the bound
        `struct.Struct.pack_into` that takes a buffer, an offset and the values.
    """
    layout, at, nested, unset = "=", 0, [], []
    for name, c_type in kind._fields_:  # type: ignore[misc]
        offset, size = getattr(kind, name).offset, ctypes.sizeof(c_type)
        simple = issubclass(c_type, ctypes._SimpleCData)
        if not simple:
            nested.append(name)
        code = _CODES[c_type] if simple else f"{size}s"
        layout += f"{offset - at}x{code}"
        unset.append(0 if simple else b"")
        at = offset + size
    names = tuple(name for name, _ in kind._fields_)  # type: ignore[misc]
    return names, tuple(nested), tuple(unset), struct.Struct(layout).pack_into


class PreparedLaunch:
    """A launch whose parameters stay from one to the next but where they are set.

    Args:
        kernel: what is launched.
        params: of the kernel's struct.

    Attributes:
        kernel, params: as given.

    Raises:
        TypeError: another struct.
    """

    __slots__ = ("_function", "_launch", "_pointers", "kernel", "params")

    def __init__(self, kernel: Kernel, params: Any) -> None:
        if type(params) is not kernel.parameters:
            raise TypeError(f"{kernel.name} takes {kernel.parameters.__name__}, not {type(params).__name__}")
        self.kernel, self.params = kernel, params
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._function, self._launch = kernel.function, _driver().cuLaunchKernel

    def __call__(self, blocks: int, threads: int, stream: int, rows: int = 1) -> None:
        """Put it on a stream: grid (blocks, rows), so many threads a block. The driver copies the parameters.

        Raises:
            RuntimeError: the driver refused.
        """
        status = self._launch(self._function, blocks, rows, 1, threads, 1, 1, 0, stream, self._pointers, None)
        if status:
            raise RuntimeError(
                f"cuLaunchKernel of {self.kernel.name} in {blocks} x {rows} blocks of {threads}: CUDA error {status}"
            )

    def copy(self, kernel: Kernel | None = None, **fields: Any) -> PreparedLaunch:
        """The same launch of this kernel or another one, with these parameters changed."""
        other = PreparedLaunch(kernel or self.kernel, type(self.params).from_buffer_copy(self.params))
        for name, value in fields.items():
            setattr(other.params, name, value)
        return other
