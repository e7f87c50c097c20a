"""Where gradients live: the interface that the host and a GPU share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.environment import gpu_problem, is_cuda_error, kernel_problem
from collectives.mpi import MpiTransport
from collectives.transport import Transport
from oktopk.cpu.backend import HostBackend
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.settings import Settings

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
        """Check the caller's gradient, an array of this backend or a tensor list; returns it, not copied.

        Raises:
            TypeError, ValueError: of another type, length or device, or not contiguous.
        """

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """As `GradientAllreduce.gradient_tensors`, where kernels can read such a gradient."""

    def stream_scope(self) -> AbstractContextManager[Any]:
        """Enter the device and stream that kernels run on."""

    def to_host(self, array: Any) -> NDArray[np.float32]:
        """A copy on the host."""

    def from_host(self, array: NDArray[np.float32]) -> Any:
        """A copy on this backend."""

    def read_only(self, array: Any) -> Any:
        """The array, not to be written to where the backend's arrays can say so."""

    def share_memory(self, one: Any, other: Any) -> bool:
        """Whether two arrays, or a tensor list and an array, have memory in common; False if that is not known."""

    def indices(self, entries: Any) -> NDArray[np.int32]:
        """int32[nnz] on the host: the indices of ENTRY[nnz]."""

    def p2p_step(self, transport: Transport, length: int, settings: Settings) -> Any:
        """The kernels of a step that read other ranks' memory, as `oktopk.cuda.p2p_step.P2PStep`; None without such memory."""

    def wait(self) -> None:
        """Wait until all work on arrays is done, so that MPI may read them."""


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
    from oktopk.cuda.backend import DeviceBackend

    try:
        return DeviceBackend(gradient_type, stream)  # type: ignore[return-value]
    except Exception as error:
        if not is_cuda_error(error):
            raise
        raise RuntimeError(f"device 'cuda' cannot be used: {kernel_problem(error)}") from error
