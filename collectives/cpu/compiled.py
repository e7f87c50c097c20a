"""Compiled code of kernels, kept from process to process in Numba's cache.

Numba itself keys what it keeps by the bytes of a kernel's own file, its types and the processor. It does not see the other files
that a kernel takes code from, nor LLVM's version; and a process that is killed while it writes, or another rank that reads
meanwhile, may take code of an earlier file for the new one. So here the names of the files have a digest of all of that.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types

from collectives.sparse import ENTRY

ENTRIES = types.Array(numba.from_dtype(ENTRY), 1, "C", aligned=False)
VECTOR = types.float32[::1]
INT, FLOAT, BOOL, NONE = types.int64, types.float64, types.boolean, types.none

_kernels: list[tuple[Any, tuple[tuple[Any, ...], ...]]] = []


@cache
def _digest(file: Path) -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in (file, *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled(*signatures: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel when it is first called, or take it from the cache.

    A kernel may take code only from its own file and from this package.

    Args:
        signatures: types of the arguments in each way that steps call it, for `load` and `fill`. Others work, too.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        file = sys.modules[function.__module__].__file__
        assert file is not None
        function.__qualname__ += f"_{_digest(Path(file))}"
        kernel = njit(cache=True, nogil=True)(function)  # a backward pass may run beside it
        _kernels.append((kernel, signatures))
        return kernel

    return decorate


@cache
def load() -> None:
    """Load what the cache has of all kernels, so that no step waits for it. Compiles nothing where a cache was not filled."""
    for kernel, signatures in _kernels:
        path, name = Path(kernel.stats.cache_path), kernel.py_func.__qualname__
        if signatures and any(path.glob(f"*.{name}-*.nbi")):
            for signature in signatures:
                kernel.compile(signature)


def fill() -> int:
    """Compile all kernels that the cache lacks for this processor. Returns how many signatures that were."""
    for kernel, signatures in _kernels:
        for signature in signatures:
            kernel.compile(signature)
    return sum(sum(kernel.stats.cache_misses.values()) for kernel, _ in _kernels)
