"""Compiled kernels and their launches, which cost the host a third of CuPy's: a pointer to one struct goes to the driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import cupy

from collectives.cuda.layouts import PARAMETERS, source_with_layouts

_HEADERS = Path(__file__).parent


@functools.cache
def compiled(source: Path, *defines: str) -> Any:
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
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    sizes = [ctypes.c_uint] * 7
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *sizes, *[ctypes.c_void_p] * 3]
    return library


class Kernel:
    """One kernel of a module.

    Attributes:
        name: in the source.
        parameters: the struct that it takes.
        function: the driver's handle.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.name = name
        self.parameters = PARAMETERS[name]
        self._raw = module.get_function(name)  # keeps the module loaded
        self.function = self._raw.kernel.ptr
        self._last: dict[str, Any] = {}  # fields of the last `launch`
        self._reused = self.prepare()

    def prepare(self, **fields: Any) -> PreparedLaunch:
        """A launch with these parameters; the others are 0."""
        return PreparedLaunch(self, self.parameters(**fields))

    def launch(self, blocks: int, threads: int, stream: int, rows: int, fields: dict[str, Any]) -> None:
        """Put the kernel on a stream once, with these parameters; the others are 0."""
        last = self._last
        if fields.keys() == last.keys():  # the same call as the last one: its struct serves again
            params = self._reused.params
            for name, value in fields.items():
                # most addresses and sizes stay; a struct may have changed where it lies
                if value != last[name] or type(value) is not int:
                    setattr(params, name, value)
        else:
            self._reused = self.prepare(**fields)
        self._last = fields
        self._reused(blocks, threads, stream, rows)


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
