"""Sparse vectors in coordinate form, in the layout that travels on the wire; types of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype([("index", "<i4"), ("value", "<f4")])
"""One COO entry: 8 bytes, so that one message carries indices and values."""

Array: TypeAlias = NDArray[Any]
"""Of NumPy or CuPy, which has NumPy's interface and no types. An `NDArray` is on the host."""

Vector: TypeAlias = NDArray[np.float32]
"""An `Array` of float32[n]."""

Entries: TypeAlias = NDArray[np.void]
"""ENTRY[nnz]; on a GPU a `collectives.cuda.device.DeviceEntries`, with the slices of an array."""

Kernels: TypeAlias = Any
"""The module `cpu.kernels`, or for a GPU a `cuda.kernels.DeviceKernels` with its functions."""

MAX_LENGTH = 2**31 - 1
"""Largest vector that an int32 index addresses."""


@dataclass(slots=True)
class SparseVector:
    """A vector of `length` elements, of which `entries` are stored.

    Attributes:
        entries: ENTRY[nnz], indices strictly ascending within [0, length).
        length: elements of the dense vector (n).
    """

    entries: Entries
    length: int

    @property
    def nnz(self) -> int:
        """Stored entries."""
        return len(self.entries)

    @property
    def indices(self) -> NDArray[np.int32]:
        """int32[nnz] view, ascending."""
        return self.entries["index"]

    @property
    def values(self) -> NDArray[np.float32]:
        """float32[nnz] view."""
        return self.entries["value"]

    @classmethod
    def from_pairs(
        cls, indices: NDArray[np.integer], values: NDArray[np.floating], length: int
    ) -> SparseVector:
        """Pack index and value arrays, both [nnz]; indices must ascend strictly within [0, length).

        Raises:
            ValueError: the arrays differ in shape, or an index is out of range or out of order.
        """
        if indices.shape != values.shape or indices.ndim != 1:
            raise ValueError(
                f"indices {indices.shape} and values {values.shape} are not one vector each of one length"
            )
        if len(indices):
            if indices[0] < 0 or indices[-1] >= length:
                raise ValueError(f"indices {indices[0]}..{indices[-1]} are not within [0, {length})")
            if np.any(indices[1:] <= indices[:-1]):
                raise ValueError("indices do not ascend strictly")
        entries = np.empty(len(indices), ENTRY)
        entries["index"] = indices
        entries["value"] = values
        return cls(entries, length)

    @classmethod
    def empty(cls, length: int) -> SparseVector:
        """A vector with nothing stored."""
        return cls(np.empty(0, ENTRY), length)


def check_length(length: int) -> None:
    """Refuse a vector that int32 indices cannot address.

    Raises:
        ValueError: length is no integer, or not in [1, 2**31 - 1].
    """
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise ValueError(f"length {length!r} is not an integer")
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(
            f"length {length} is not in [1, {MAX_LENGTH}]: indices travel as int32; split the gradient into several buckets"
        )


def slices(entries: Entries, sizes: list[int]) -> list[Entries]:
    """Consecutive slices of so many entries each."""
    cut, start = [], 0
    for size in sizes:
        cut.append(entries[start : start + size])
        start += size
    return cut
