"""Where a gradient lives: the one place that knows the host from a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.environment import gpu_problem, is_cuda_error, kernel_problem
from collectives.mpi import MpiTransport
from collectives.transport import Transport
from oktopk.cpu import kernels as host_kernels
from oktopk.cuda.multi_tensor import GradientTensors

GRADIENT_TYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16", "float16")}
"""device -> gradient types it takes."""


class Backend(Protocol):
    """Arrays and kernels of one device.

    Attributes:
        kernels: the gradient kernels.
    """

    kernels: ModuleType

    def connect(self, host: MpiTransport) -> Transport:
        """The transport for arrays of this backend, made of a host transport, which it replaces. Collective."""

    def zeros(self, length: int) -> Any:
        """float32[length] of zeros."""

    def validate(self, gradient: Any, length: int) -> Any:
        """The caller's gradient as an array of this backend, or in pieces where steps read such, not copied.

        Raises:
            TypeError, ValueError: of another type, length or device, or not contiguous.
        """

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """As `GradientAllreduce.gradient_tensors`, where kernels can read such a gradient."""

    def stream_scope(self) -> AbstractContextManager[Any]:
        """Within it all work is put where it belongs."""

    def to_host(self, array: Any) -> NDArray[np.float32]:
        """A copy on the host."""

    def from_host(self, array: NDArray[np.float32]) -> Any:
        """A copy on this backend."""

    def indices(self, entries: Any) -> NDArray[np.int32]:
        """int32[nnz] on the host: the indices of ENTRY[nnz]."""

    def wait(self) -> None:
        """Until all work on arrays is done, however it was started, so that MPI may read them."""


class HostBackend:
    """NumPy arrays and numba kernels."""

    kernels = host_kernels

    def connect(self, host: MpiTransport) -> Transport:
        """As the protocol says."""
        return host

    def zeros(self, length: int) -> NDArray[np.float32]:
        """As the protocol says."""
        return np.zeros(length, np.float32)

    def validate(self, gradient: NDArray[np.float32], length: int) -> NDArray[np.float32]:
        """As the protocol says."""
        if gradient.dtype != np.float32:
            raise TypeError(f"gradient dtype {gradient.dtype} is not float32")
        if gradient.shape != (length,):
            raise ValueError(f"gradient shape {gradient.shape} is not ({length},)")
        if not gradient.flags.c_contiguous:
            raise ValueError("gradient is not contiguous")
        return gradient

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """As the protocol says: nowhere here."""
        raise NotImplementedError("kernels of the host read one vector")

    def stream_scope(self) -> AbstractContextManager[Any]:
        """As the protocol says."""
        return nullcontext()

    def to_host(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the protocol says."""
        return array.copy()

    def from_host(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the protocol says."""
        return np.array(array, np.float32)

    def indices(self, entries: NDArray[np.void]) -> NDArray[np.int32]:
        """As the protocol says."""
        return np.asarray(entries["index"])

    def wait(self) -> None:
        """As the protocol says."""


def make_backend(device: str, gradient_type: str, stream: Any) -> Backend:
    """The backend of a device by name; talks to no other rank.

    Args:
        device: "cpu" or "cuda", the current GPU.
        gradient_type: one of `GRADIENT_TYPES[device]`.
        stream: for "cuda", the cupy stream that gradients are produced on; None: the current one.

    Raises:
        ValueError: device or gradient type is unknown.
        RuntimeError, MemoryError: the device cannot be used; the message says why, and what to do.
    """
    if device not in GRADIENT_TYPES:
        raise ValueError(f"device {device!r} is not one of {', '.join(GRADIENT_TYPES)}")
    if gradient_type not in GRADIENT_TYPES[device]:
        taken = ", ".join(GRADIENT_TYPES[device])
        raise ValueError(f"gradient_type {gradient_type!r} on {device} is not one of {taken}")
    if device == "cpu":
        return HostBackend()  # type: ignore[return-value]
    if problem := gpu_problem():
        raise RuntimeError(f"device 'cuda' cannot be used: {problem}")
    from oktopk.cuda.executor import DeviceBackend

    try:
        return DeviceBackend(gradient_type, stream)  # type: ignore[return-value]
    except Exception as error:
        if not is_cuda_error(error):
            raise
        raise RuntimeError(f"device 'cuda' cannot be used: {kernel_problem(error)}") from error
