"""Compiled code of kernels, kept from process to process in Numba's cache.

Numba itself keys what it keeps by the bytes of a kernel's own file, its types and the processor. It does not see the other files
that a kernel takes code from, nor LLVM's version; and a process that is killed while it writes, or another rank that reads
meanwhile, may take code of an earlier file for the new one. So here the names of the files have a digest of all of that.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types

from collectives.sparse import ENTRY

ENTRIES = types.Array(numba.from_dtype(ENTRY), 1, "C", aligned=False)
VECTOR = types.float32[::1]
INT, FLOAT, BOOL, NONE = types.int64, types.float64, types.boolean, types.none

UNCACHED = "Numba can write to no folder for compiled kernels, neither beside the packages nor under HOME: set NUMBA_CACHE_DIR"

_kernels: list[tuple[Any, tuple[tuple[Any, ...], ...]]] = []


@cache
def _digest(file: Path) -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in chain(*(sorted(folder.glob("*.py")) for folder in (file.parent, Path(__file__).parent))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled(*signatures: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel when it is first called, or take it from the cache.

    A kernel may take code only from files of its own folder and of this one.

    Args:
        signatures: types of the arguments in each way that steps call it, for `load` and `fill`. Others work, too.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        file = sys.modules[function.__module__].__file__
        assert file is not None
        function.__qualname__ += f"_{_digest(Path(file))}"
        kernel = _compiler(function)
        _kernels.append((kernel, signatures))
        return kernel

    return decorate


def _compiler(function: Callable[..., Any]) -> Any:
    """A kernel, which a backward pass may run beside; with a cache where there is a place for it."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _say_uncached()
        return njit(nogil=True)(function)


@cache
def _say_uncached() -> None:
    warnings.warn(
        f"{UNCACHED}: every process compiles kernels anew, which takes its first steps some 10 s",
        stacklevel=2,
    )


@cache
def load() -> None:
    """Load what the cache has of all kernels, so that no step waits for it. Compiles nothing where a cache was not filled."""
    for kernel, signatures in _kernels:
        if kernel.stats.cache_path is None:
            continue
        path, name = Path(kernel.stats.cache_path), kernel.py_func.__qualname__
        if signatures and any(path.glob(f"*.{name}-*.nbi")):
            for signature in signatures:
                kernel.compile(signature)


def cache_problem() -> str:
    """Why compiled kernels are not kept, in a sentence; "" if they are."""
    return "" if all(kernel.stats.cache_path for kernel, _ in _kernels) else UNCACHED


def fill() -> int:
    """Compile all kernels that the cache lacks for this processor. Returns how many signatures that were."""
    for kernel, signatures in _kernels:
        for signature in signatures:
            kernel.compile(signature)
    return sum(sum(kernel.stats.cache_misses.values()) for kernel, _ in _kernels)
