"""Tensors and the arrays that the reducer takes, over the same memory: the one place that knows where tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.cuda.environment import gpu_problem
from collectives.element_types import ELEMENT_TYPES
from collectives.sparse import Array
from oktopk import devices
from oktopk.backend import Ready, Stream

GRADIENT_TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in devices.GRADIENT_TYPES["cuda"]
}
"""What `GradientAllreduce` calls a type of torch's."""

TYPE_NAMES = {dtype: name for name, dtype in GRADIENT_TYPES.items()}
"""The same, by the type of torch's."""


class TensorMemory:
    """Memory that torch and the reducer share: NumPy arrays.

    Attributes:
        device: what `GradientAllreduce` calls it.
        stream: the stream that torch works on, as the reducer takes it; None where there is none.
    """

    device = "cpu"
    stream: Stream | None = None

    def array(self, tensor: Tensor) -> Array:
        """A contiguous tensor as the reducer's array; the memory is shared. bfloat16 becomes its bits in uint16."""
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view("uint16")
        return tensor.numpy()

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An array of the reducer's as a tensor; the memory is shared.

        Args:
            dtype: torch.bfloat16 for its bits in uint16; else that of the array.
        """
        if dtype == torch.bfloat16:
            return self._tensor(array.view("int16")).view(torch.bfloat16)
        return self._tensor(array)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array)

    def stream_scope(self) -> AbstractContextManager[None]:
        """Order the reducer's work after torch's earlier work and before its later work."""
        return nullcontext()

    def before_torch(self) -> AbstractContextManager[None]:
        """Order the reducer's work before torch's later work alone: `after` has ordered it behind what it reads.

        Other work of the reducer is then not held up by what torch has still to do, such as a backward pass that is replayed.
        """
        return nullcontext()

    def on_stream(self) -> AbstractContextManager[object]:
        """Put torch's work in between on the reducer's stream."""
        return nullcontext()

    def mark(self) -> Any:
        """A point after torch's work until now, for `after`; in a CUDA graph that is captured, a point of every replay."""
        return None

    def after(self, mark: Any) -> Ready:
        """What to call, in any thread, before the reducer reads what was filled before a mark, with the stream that reads it.

        None where there is nothing to call.
        """
        return None

    def after_current(self) -> Ready:
        """As `after`, of a mark that is set now."""
        return self.after(self.mark())


_CUPY_TYPES: dict[torch.dtype, Any] = {
    getattr(torch, name): each.dtype for name, each in ELEMENT_TYPES.items()
}
_CUPY_TYPES |= {torch.int32: np.int32, torch.int64: np.int64}


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# a tenth of the time: without an object for the stream
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


class CudaMemory(TensorMemory):
    """CuPy arrays on the current GPU, over the memory of contiguous tensors.

    Args:
        place: a CUDA device.
        beside: the reducer's stream is one of its own, of high priority; else torch's current one now.

    Raises:
        ValueError: it is not the current GPU, or CuPy cannot use it.
    """

    device = "cuda"
    stream: Stream

    def __init__(self, place: torch.device, beside: bool = False) -> None:
        if problem := gpu_problem():
            raise ValueError(f"parameters are on {place}, but {problem}")
        import cupy

        current = torch.cuda.current_device(), cupy.cuda.Device().id
        if current != (place.index, place.index):
            raise ValueError(
                f"parameters are on {place}, but the current GPU is {current[0]} in torch and {current[1]} in CuPy: call "
                f"torch.cuda.set_device({place.index}) before"
            )
        self._cupy = cupy
        self._torch_stream = (
            torch.cuda.Stream(place, priority=-1) if beside else torch.cuda.current_stream(place)
        )
        self.stream = cupy.cuda.ExternalStream(self._torch_stream.cuda_stream, place.index)
        self._index, self._raw = place.index, self._torch_stream.cuda_stream

    def array(self, tensor: Tensor) -> Array:
        """As on the host; bfloat16, which CuPy does not have, as the bits in uint16.

        The caller works on `stream`, and orders it behind what torch writes by `after`, or by `stream_scope` where torch's
        current stream is another.
        """
        if tensor.dtype not in _CUPY_TYPES or not tensor.is_contiguous():
            return self._cupy.from_dlpack(tensor)
        # DLPack takes 60 us a tensor
        cuda, place = self._cupy.cuda, tensor.device.index
        memory = cuda.UnownedMemory(tensor.data_ptr(), tensor.nbytes, tensor, place)
        return self._cupy.ndarray(tensor.shape, _CUPY_TYPES[tensor.dtype], cuda.MemoryPointer(memory, 0))

    def _tensor(self, array: Array) -> Tensor:
        with self.stream:  # else torch's current stream would wait for CuPy's, which may be the default one
            return torch.from_dlpack(array)

    @contextmanager
    def stream_scope(self) -> Iterator[None]:
        """As on the host, with something to do where torch's current stream has changed."""
        if _raw_stream(self._index) != self._raw:
            self._torch_stream.wait_stream(torch.cuda.current_stream(self._index))
        with self.before_torch():
            yield

    @contextmanager
    def before_torch(self) -> Iterator[None]:
        """As on the host."""
        current = None
        if _raw_stream(self._index) != self._raw:
            current = torch.cuda.current_stream(self._index)
        try:
            yield
        finally:
            if current is not None:
                current.wait_stream(self._torch_stream)

    def on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._torch_stream)

    def mark(self) -> torch.cuda.Event:
        capturing = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(external=True) if capturing else torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._torch_stream.device))
        return event

    def after(self, mark: torch.cuda.Event) -> Callable[[Stream], None]:
        # the closure keeps the event until it is waited for
        return lambda stream: self._cupy.cuda.runtime.streamWaitEvent(stream.ptr, mark.cuda_event)


def memory_of(place: torch.device, beside: bool = False) -> TensorMemory:
    """The memory of a device.

    Args:
        place: the device.
        beside: as `CudaMemory`.

    Raises:
        ValueError: it cannot be used; the message says why, and what to do.
    """
    if place.type == "cpu":
        return TensorMemory()
    if place.type == "cuda":
        return CudaMemory(place, beside)
    raise ValueError(f"parameters are on {place}, not on cpu or cuda")
