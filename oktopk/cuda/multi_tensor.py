"""A gradient in pieces: arrays that follow each other as one vector would, and the table that tells kernels where each lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collectives.cuda.device import Device
    from collectives.cuda.launch import Kernel

_PLACED = 4096  # of pieces.cuh: elements of a chunk


class GradientTensors:
    """A gradient of n elements on a GPU, in pieces that steps read where they lie; made by `GradientAllreduce.gradient_tensors`.

    All of it is zero until `set_pointers` is called.

    Args:
        device: where kernels run.
        kernels: what reads such a gradient, by the names of what reads one vector, and `place_pieces`.
        sizes: elements of the pieces, in the order of the vector; 0 is none.
        element_bytes: of an element of a piece.

    Attributes:
        length: elements of all pieces (n).
        address: what kernels take in the place of a vector's: that of the table, which stays the same.
        kernels: as given.

    Raises:
        MemoryError: the GPU's memory does not suffice.

    Memory: n/512 bytes, and 16 bytes a piece, on the device.
    """

    def __init__(
        self, device: Device, kernels: Mapping[str, Kernel], sizes: Sequence[int], element_bytes: int
    ) -> None:
        held = np.asarray(sizes, np.int64)
        self.kernels = kernels
        self.length = int(held.sum())
        self._device, self._element_bytes = device, element_bytes
        self._filled = np.flatnonzero(held)
        self._chunks = -(-self.length // _PLACED)
        self._table = device.allocate(self._chunks + 2 * len(self._filled), np.uint64)
        self.address: int = self._table.data.ptr
        # (begin, address) of each
        self._pieces = np.zeros((len(self._filled), 2), np.uint64)
        self._pieces[:, 0] = (held.cumsum() - held)[self._filled]
        self._addresses: list[int] | None = None
        self._count = len(held)
        self.set_pointers([0] * self._count)

    def set_pointers(self, addresses: Sequence[int]) -> None:
        """Say where the pieces lie from here on; what is on the stream already still reads them where they were.

        Nothing is done where no address has changed; above 4,096 pieces this may wait for the stream. Whoever gives memory back
        must see to it that it is not written to before what reads it was done: the allocators of one stream do.

        Args:
            addresses: of the pieces, each a multiple of an element's bytes; 0: zeros.

        Raises:
            ValueError: another number of addresses than of pieces, or one that no element can lie at.
        """
        if addresses == self._addresses:
            return
        placed = np.array(addresses, np.uint64)
        if len(placed) != self._count:
            raise ValueError(f"{len(placed)} addresses for {self._count} pieces")
        odd = placed % self._element_bytes != 0
        if odd.any():
            at = int(odd.argmax())
            raise ValueError(
                f"address {placed[at]} of piece {at} is not a multiple of an element's {self._element_bytes} bytes"
            )
        self._pieces[:, 1] = placed[self._filled]
        count = len(self._pieces)
        self._device.upload(self.address + 8 * self._chunks, self._pieces)
        self._device.launch_for(
            self.kernels["place_pieces"], self._chunks, self.address, self.length, count, self._element_bytes
        )
        self._addresses = list(addresses)


def pointer_of(gradient: Any) -> int:
    """What kernels that read a gradient, an array or in pieces, take for it."""
    return int(gradient.address if isinstance(gradient, GradientTensors) else gradient.data.ptr)
