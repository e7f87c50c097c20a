"""Why a GPU cannot be used, and the remedy, as sentences. Imports without CuPy and without a GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

NEEDED = (8, 0)
"""Least compute capability: the kernels use `__reduce_add_sync`, which came with 8.0."""

SEE_ITS_STATE = "see nvidia-smi for its state and compute mode"

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def gpu_problem() -> str:
    """Why CuPy cannot use the current GPU, and the remedy; "" if it can.

    Checks, in this order: CuPy, the driver, CuPy's CUDA against the driver's, the GPU, its compute capability, a context.
    """
    try:
        import cupy
    except Exception as error:  # a broken installation raises whatever it likes
        return _import_problem(error)
    if len(packages := cupy_packages()) > 1:
        return _several(packages)
    runtime = cupy.cuda.runtime
    try:
        driver, built_for = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        if not driver:
            return "there is no NVIDIA driver on this host: use device 'cpu', or install the driver"
        if built_for // 1000 > driver // 1000:
            return (
                f"CuPy is built for CUDA {built_for // 1000}, and the driver supports CUDA {_dotted(driver)} at most: "
                f"pip uninstall {' '.join(packages) or 'cupy'}, then {installation()}; or install a newer driver"
            )
        if not runtime.getDeviceCount():
            return _NO_GPU
        device = cupy.cuda.Device()
        digits = device.compute_capability  # "80", "90", "120"
        capability = int(digits[:-1]), int(digits[-1])
        if capability < NEEDED:
            return (
                f"GPU {device.id} has compute capability {capability[0]}.{capability[1]}, and the kernels need "
                f"{NEEDED[0]}.{NEEDED[1]} (Ampere) or later: use another GPU or device 'cpu'"
            )
        runtime.memGetInfo()  # needs a context, which an exclusive or broken GPU refuses
    except Exception as error:
        if "NoDevice" in str(error):
            return _NO_GPU
        if "InsufficientDriver" in str(error):
            return f"the NVIDIA driver is missing or too old for CuPy ({error}): {installation()}, or a newer driver"
        return f"the GPU cannot be used ({error}): {SEE_ITS_STATE}"
    return ""


_NO_GPU = (
    "there is no GPU, or CUDA_VISIBLE_DEVICES hides it: use device 'cpu', or ask the batch system for GPUs"
)


def kernel_problem(error: Exception) -> str:
    """Why the kernels cannot be compiled, from CuPy's error."""
    if isinstance(error, MemoryError) and not is_cuda_error(error):
        return str(error)  # a sentence of `device_memory` or `pinned_memory`
    if "out of memory" in str(error).lower():
        return _out_of_memory(f"{first_line(error)}: ")
    return (
        f"the kernels cannot be compiled for this GPU ({first_line(error)}): CuPy takes NVRTC and CUDA's headers "
        f"from its [ctk] extra, {installation()}"
    )


def is_cuda_error(error: Exception) -> bool:
    """Whether it may come from CuPy, whose errors have no common base, or from a library that CuPy loads."""
    return isinstance(error, RuntimeError | OSError | ImportError) or type(error).__module__.startswith(
        "cupy"
    )


@functools.cache  # the metadata of a hundred distributions take 50 ms to read
def cupy_packages() -> list[str]:
    """Installed distributions of a module `cupy`, by name; several overwrite each other's files."""
    names = {str(package.metadata["Name"] or "").lower() for package in importlib.metadata.distributions()}
    return sorted(name for name in names if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")))


def installation() -> str:
    """The command that installs the CuPy for this host's driver."""
    major = driver_version() // 1000
    if major in (12, 13):
        return f"pip install 'cupy-cuda{major}x[ctk]'"
    return "pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x, as the driver is)"


@functools.cache
def driver_version() -> int:
    """The newest CUDA that the driver supports, as 1000 * major + 10 * minor; 0 without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    return 0 if library.cuDriverGetVersion(ctypes.byref(version)) else version.value


def device_memory(nbytes: int) -> Any:
    """cupy.cuda.Memory of `nbytes`, from cudaMalloc itself.

    Raises:
        MemoryError: with the bytes wanted and free.
    """
    import cupy

    return _memory(cupy.cuda.Memory, nbytes, lambda: _out_of_memory(f"{nbytes:,} bytes wanted, "))


def pinned_memory(nbytes: int) -> Any:
    """Page-locked host memory of `nbytes`.

    Raises:
        MemoryError: with the bytes wanted.
    """
    import cupy

    problem = f"{nbytes:,} bytes of page-locked host memory cannot be had for staging: "
    problem += "see free -g, the memory limit of the job and ulimit -l"
    return _memory(cupy.cuda.alloc_pinned_memory, nbytes, lambda: problem)


def _memory(allocate: Callable[[int], Any], nbytes: int, problem: Callable[[], str]) -> Any:
    import cupy

    try:
        return allocate(nbytes)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        raise MemoryError(problem()) from None


def _out_of_memory(what: str) -> str:
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return (
        f"GPU {cupy.cuda.Device().id} is out of memory: {what}{free:,} of {total:,} bytes free. "
        "Other processes hold it, or this one's pools do: torch.cuda.empty_cache() and "
        "cupy.get_default_memory_pool().free_all_blocks() give back what they keep"
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's text; for CuPy's report of a failed import, its original error."""
    text = str(error)
    lines = [
        line.strip(" =") for line in text.partition("Original error:")[2].splitlines() or text.splitlines()
    ]
    return next((line for line in lines if line), type(error).__name__)


def _import_problem(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
        without = (
            "" if driver_version() else ", and this host has no NVIDIA driver: use device 'cpu', or both"
        )
        return f"CuPy is not installed{without}: {installation()}"
    packages = cupy_packages()
    if len(packages) > 1:
        return _several(packages)
    return (
        f"CuPy is installed but does not import ({first_line(error)}): "
        f"pip uninstall {' '.join(packages) or 'cupy'}, then {installation()}"
    )


def _several(packages: list[str]) -> str:
    names = " ".join(packages)
    return (
        f"several CuPy packages are installed, {names}, which overwrite each other's files: "
        f"pip uninstall {names}, then {installation()}"
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
