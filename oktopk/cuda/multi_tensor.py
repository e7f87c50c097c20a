"""A gradient as a list of tensors that follow each other as one vector would, and the table through which kernels find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oktopk.cuda.layouts import CHUNK

if TYPE_CHECKING:
    from collectives.cuda.device import CuArray, Device
    from collectives.cuda.launch import Kernel


class ComposedGradient:
    """A gradient that is no vector: kernels of its own find its elements.

    Attributes:
        address: what they take in place of a vector's.
        kernels: by the names of those that read one vector, "accumulate_select" and "undo_accumulate" among them.
    """

    address: int
    kernels: Mapping[str, Kernel]


class GradientTensors(ComposedGradient):
    """A gradient of n elements on a GPU, as tensors that steps read in place; made by `GradientAllreduce.gradient_tensors`.

    All of it is zero until `set_pointers` is called.

    Args:
        device: where kernels run.
        kernels: that read such a gradient, by the names of those that read one vector, and `locate_chunks`.
        sizes: elements of the tensors, in the order of the vector; may be 0.
        element_bytes: of a tensor's element.

    Attributes:
        length: elements of all tensors (n).
        address: of head and table, which stays the same; kernels take it in place of a vector's.
        kernels: as given.

    Raises:
        MemoryError: the GPU's memory does not suffice.

    Memory: n/512 bytes, and 16 bytes a tensor, on the device.
    """

    HEAD = 0
    """Words before the table, of what is more than a tensor list."""

    def __init__(
        self, device: Device, kernels: Mapping[str, Kernel], sizes: Sequence[int], element_bytes: int
    ) -> None:
        counts = np.asarray(sizes, np.int64)
        self.kernels = kernels
        self.length = int(counts.sum())
        self._device, self._element_bytes = device, element_bytes
        self._filled = np.flatnonzero(counts)
        self._chunks = -(-self.length // CHUNK)
        self._memory = device.allocate(self.HEAD + self._chunks + 2 * len(self._filled), np.uint64)
        self.address: int = self._memory.data.ptr
        self._table = self.address + 8 * self.HEAD
        self._spans = np.zeros((len(self._filled), 2), np.uint64)  # TensorSpan[]: begin, address
        self._spans[:, 0] = (counts.cumsum() - counts)[self._filled]
        self._addresses: list[int] | None = None
        self._count = len(counts)
        self.set_pointers([0] * self._count)

    def set_pointers(self, addresses: Sequence[int]) -> None:
        """Set where the tensors lie from here on; work on the stream still reads them at their old addresses.

        Does nothing where no address has changed; above 4,096 tensors this may wait for the stream. The caller must not free a
        tensor's memory for other use before the work that reads it is done: allocators of one stream ensure that.

        Args:
            addresses: of the tensors, each a multiple of an element's bytes; 0: zeros.

        Raises:
            ValueError: another number of addresses than of tensors, or one that no element can lie at.
        """
        if addresses == self._addresses:
            return
        pointers = np.array(addresses, np.uint64)
        if len(pointers) != self._count:
            raise ValueError(f"{len(pointers)} addresses for {self._count} tensors")
        odd = pointers % self._element_bytes != 0
        if odd.any():
            at = int(odd.argmax())
            raise ValueError(
                f"address {pointers[at]} of tensor {at} is not a multiple of an element's {self._element_bytes} bytes"
            )
        self._spans[:, 1] = pointers[self._filled]
        self._device.upload(self._table + 8 * self._chunks, self._spans)
        self._device.launch_for(
            self.kernels["locate_chunks"], self._chunks,
            table=self._table, n=self.length, tensors=len(self._spans), element_bytes=self._element_bytes,
        )  # fmt: skip
        self._addresses = list(addresses)


def pointer_of(gradient: CuArray | ComposedGradient) -> int:
    """The address that kernels take for a gradient, an array or a composed one."""
    return int(gradient.address if isinstance(gradient, ComposedGradient) else gradient.data.ptr)
