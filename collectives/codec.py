"""Codecs: a list of entries as the bytes that travel.

Both ends of a message know its bytes before it starts. The ranks exchange numbers of entries first (the alltoall of
`split_and_reduce`, the counts of an allgatherv), and `wire_bytes` computes the bytes from these. A codec whose bytes
depend on the data sends `wire.nbytes` beside each number; for this, patterns encode before they exchange the numbers.

A lossy codec sends rounded values. The sender decodes its own wire array and keeps entries - decode(encode(entries)) in its
residual. An allgatherv passes wire arrays on as they are, so that an entry is encoded once and all ranks decode the same.

Only `split_and_reduce` and `balance_and_allgatherv` take a codec, and no method passes one yet. TopkA, Gaussiank, gTopk,
`allgather_regions` (TopkDSA) and steps through peer memory send plain entries.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import ENTRY

Counts = TypeVar("Counts", int, NDArray[np.int64])


class Codec(Protocol):
    """Encodes entries on the device where they lie. A wire array is contiguous, of any type, and is sent as it is.

    Attributes:
        name: equal on all ranks of an exchange.
    """

    name: str

    def wire_bytes(self, count: Counts) -> Counts:
        """Bytes of a wire array of `count` entries; elementwise for an array of counts."""

    def encode(self, entries: NDArray[np.void], lower: int, upper: int) -> NDArray[Any]:
        """The wire array of ENTRY[nnz], ascending indices in [lower, upper); valid until the message was waited for."""

    def receive_buffer(self, out: NDArray[np.void]) -> NDArray[Any]:
        """The wire array to receive so many entries in; `out` itself where entries arrive as they are."""

    def decode(self, wire: NDArray[Any], lower: int, upper: int, out: NDArray[np.void]) -> None:
        """Fill `out`, ENTRY[count], from its wire array; lower and upper as in `encode`.

        Raises:
            ValueError: the bytes are not those of `count` entries in [lower, upper).
        """


class PlainCodec:
    """The 8-byte COO entry: nothing is encoded, copied or lost."""

    name = "plain"

    def wire_bytes(self, count: Counts) -> Counts:
        return count * ENTRY.itemsize

    def encode(self, entries: NDArray[np.void], lower: int, upper: int) -> NDArray[Any]:
        return entries

    def receive_buffer(self, out: NDArray[np.void]) -> NDArray[Any]:
        return out

    def decode(self, wire: NDArray[Any], lower: int, upper: int, out: NDArray[np.void]) -> None:
        """Nothing to do: `out` is the wire array."""


PLAIN = PlainCodec()
