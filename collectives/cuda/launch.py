"""Compiled kernels, and their launches with the arguments laid out once: a third of what CuPy's cost the host."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import cupy
import numpy as np

_HEADERS = Path(__file__).parent


@functools.cache
def compiled(source: Path, *defines: str) -> Any:
    """A `.cu` file compiled for the current device, once a process.

    Args:
        source: the file; it finds headers beside it and those of `collectives/cuda`.
        defines: NAME=VALUE for the preprocessor.
    """
    includes = [f"-I{folder}" for folder in (_HEADERS, source.parent)]
    options = ("-std=c++17", *includes, *(f"-D{define}" for define in defines))
    return cupy.RawModule(code=source.read_text(), options=options)


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    sizes = [ctypes.c_uint] * 7
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, *[ctypes.c_void_p] * 3]
    return library


class Kernel:
    """One kernel of a module, with its arguments' memory laid out once: a launch costs a third of CuPy's.

    Arguments are integers of up to 8 bytes (addresses among them); a float goes in by `float_bits`.
    """

    def __init__(self, module: Any, name: str, arguments: int) -> None:
        self.name = name
        self._raw = module.get_function(name)  # keeps the module loaded
        self.function = self._raw.kernel.ptr
        self._values = (ctypes.c_uint64 * arguments)()
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * arguments)(*[base + 8 * i for i in range(arguments)])
        self.launch = _driver().cuLaunchKernel

    def __call__(self, blocks: int, rows: int, threads: int, stream: int, arguments: tuple[int, ...]) -> None:
        """Put it on a stream: grid (blocks, rows), so many threads a block.

        Raises:
            RuntimeError: the driver refused.
        """
        self._values[:] = list(arguments)
        status = self.launch(self.function, blocks, rows, 1, threads, 1, 1, 0, stream, self._pointers, None)
        if status:
            self.refused(blocks, rows, threads, status)

    def refused(self, blocks: int, rows: int, threads: int, status: int) -> None:
        """Raise what a launch that the driver refused deserves."""
        raise RuntimeError(
            f"cuLaunchKernel of {self.name} in {blocks} x {rows} blocks of {threads}: CUDA error {status}"
        )


class PreparedLaunch:
    """A launch of a kernel most of whose arguments stay from one to the next.

    Args:
        kernel: what is launched.
        arguments: as a kernel takes them; `values` may be changed between launches.

    Attributes:
        kernel: what is launched.
        values: uint64[n], the arguments by place.
    """

    __slots__ = ("_function", "_launch", "_pointers", "kernel", "values")

    def __init__(self, kernel: Kernel, *arguments: int) -> None:
        self.kernel = kernel
        self.values = (ctypes.c_uint64 * len(arguments))(*arguments)
        base = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * len(arguments))(*[base + 8 * i for i in range(len(arguments))])
        self._function, self._launch = kernel.function, kernel.launch

    def __call__(self, blocks: int, threads: int, stream: int, rows: int = 1) -> None:
        """Put it on a stream: grid (blocks, rows), so many threads a block.

        Raises:
            RuntimeError: the driver refused.
        """
        status = self._launch(self._function, blocks, rows, 1, threads, 1, 1, 0, stream, self._pointers, None)
        if status:
            self.kernel.refused(blocks, rows, threads, status)


def float_bits(value: float) -> int:
    """A float32 as a kernel argument."""
    return int(np.float32(value).view(np.uint32))


def double_bits(value: float) -> int:
    """A float64 as a kernel argument."""
    return int(np.float64(value).view(np.uint64))
