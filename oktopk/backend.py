"""Where a gradient lives: the one place that knows the host from a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.transport import Transport
from oktopk import host_kernels

GRADIENT_TYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16", "float16")}
"""device -> gradient types it takes."""


class Backend(Protocol):
    """Arrays, kernels and transport of one device.

    Attributes:
        transport: the door to MPI for arrays of this backend.
        kernels: the gradient kernels.
    """

    transport: Transport
    kernels: ModuleType

    def zeros(self, length: int) -> Any:
        """float32[length] of zeros."""

    def accept(self, gradient: Any, length: int) -> Any:
        """The caller's gradient as an array of this backend, not copied.

        Raises:
            TypeError, ValueError: of another type, length or device, or not contiguous.
        """

    def running(self) -> AbstractContextManager[Any]:
        """Within it all work is put where it belongs."""

    def to_host(self, array: Any) -> NDArray[np.float32]:
        """A copy on the host."""

    def from_host(self, array: NDArray[np.float32]) -> Any:
        """A copy on this backend."""


class HostBackend:
    """NumPy arrays and numba kernels."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.transport = Transport(comm)
        self.kernels = host_kernels

    def zeros(self, length: int) -> NDArray[np.float32]:
        """As the protocol says."""
        return np.zeros(length, np.float32)

    def accept(self, gradient: NDArray[np.float32], length: int) -> NDArray[np.float32]:
        """As the protocol says."""
        if gradient.dtype != np.float32:
            raise TypeError(f"gradient dtype {gradient.dtype} is not float32")
        if gradient.shape != (length,):
            raise ValueError(f"gradient shape {gradient.shape} is not ({length},)")
        if not gradient.flags.c_contiguous:
            raise ValueError("gradient is not contiguous")
        return gradient

    def running(self) -> AbstractContextManager[Any]:
        """As the protocol says."""
        return nullcontext()

    def to_host(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the protocol says."""
        return array.copy()

    def from_host(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the protocol says."""
        return np.array(array, np.float32)


def make_backend(device: str, comm: MPI.Intracomm, gradient_type: str, stream: Any) -> Backend:
    """The backend of a device by name. Collective.

    Args:
        device: "cpu" or "cuda", the current GPU.
        gradient_type: one of `GRADIENT_TYPES[device]`.
        stream: for "cuda", the cupy stream that gradients are produced on; None: the current one.
    """
    if device == "cpu":
        return HostBackend(comm)  # type: ignore[return-value]
    from oktopk.device_backend import DeviceBackend

    return DeviceBackend(comm, gradient_type, stream)  # type: ignore[return-value]
