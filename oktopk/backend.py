"""Where gradients live: the interface that the host and a GPU share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.mpi import MpiTransport
from collectives.transport import Transport
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.settings import Settings


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

    def copy_from_host(self, target: Any, array: NDArray[np.float32]) -> None:
        """Fill an array of this backend."""

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
