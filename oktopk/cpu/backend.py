"""Gradients on the host: NumPy arrays and numba kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.mpi import MpiTransport
from collectives.transport import Transport
from oktopk.cpu import kernels
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.settings import Settings


class HostBackend:
    """NumPy arrays and numba kernels."""

    kernels = kernels

    def connect(self, host: MpiTransport) -> Transport:
        return host

    def zeros(self, length: int) -> NDArray[np.float32]:
        return np.zeros(length, np.float32)

    def validate(self, gradient: NDArray[np.float32], length: int) -> NDArray[np.float32]:
        if not isinstance(gradient, np.ndarray):
            raise TypeError(f"gradient is a {type(gradient).__name__}, not a NumPy array")
        if gradient.dtype != np.float32:
            raise TypeError(f"gradient dtype {gradient.dtype} is not float32")
        if gradient.shape != (length,):
            raise ValueError(f"gradient shape {gradient.shape} is not ({length},)")
        if not gradient.flags.c_contiguous:
            raise ValueError("gradient is not contiguous")
        return gradient

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """As the protocol says; no kernel of the host reads one."""
        raise TypeError("kernels of the host read one vector, not a tensor list")

    def stream_scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_host(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return array.copy()

    def copy_from_host(self, target: NDArray[np.float32], array: NDArray[np.float32]) -> None:
        target[:] = array

    def read_only(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        view = array.view()
        view.flags.writeable = False
        return view

    def share_memory(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
        """As the protocol says; exact, since both are contiguous."""
        return np.may_share_memory(one, other)

    def indices(self, entries: NDArray[np.void]) -> NDArray[np.int32]:
        return np.asarray(entries["index"])

    def p2p_step(self, transport: Transport, length: int, settings: Settings) -> Any:
        """As the protocol says: None."""
        return None

    def wait(self) -> None:
        """As the protocol says."""
