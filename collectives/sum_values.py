"""Sums of one value for each entry of a list that all ranks know: an allreduce of any length.

Neither indices nor counts travel, as all ranks have the list. Of a block of values a wire array
holds, in words of 4 bytes, the largest magnitude of every 256 values, with 8 and 4 bits, and the
values:

- bfloat16 rounds to nearest even; what would become Inf is the largest finite magnitude.
- int8 and int4 are a sign and a code q in [0, Q], Q = 127 or 7. Code 0 is zero, and code q the
  magnitude whose bits as float32 are those of the largest one less (Q - q)·S: nearly logarithmic,
  over eight octaves with int8 and five with int4. The nearer of the two magnitudes around one is
  taken, of equally near ones the smaller.

A value that is Inf or NaN arrives as Inf or NaN, and makes the 256 NaN that it shares a largest
magnitude with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv
from collectives.codec import DAMAGED, NONFINITE, CodedEntries, WireLayout
from collectives.sparse import Entries, slices
from collectives.split_and_reduce import other_rank
from collectives.transport import Round, Transport
from collectives.workspace import Workspace

_BITS = {"plain": 32, "float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
_BLOCK = 256


@functools.lru_cache(256)
def values_layout(wire: str, count: int) -> WireLayout:
    """The layout of so many values on a wire in `collectives.codec.WIRES`."""
    bits = _BITS[wire]
    values = -(-count // _BLOCK) if bits < 16 else 0
    words = values + -(-count * bits // 32)
    return WireLayout(count, 0, count, bits, values=values, words=words + words % 2)


def value_words(wire: str, count: int, ranks: int) -> float:
    """Words per rank of `sum_values`, averaged over the ranks."""
    blocks = np.diff(_boundaries(count, ranks)).tolist()
    return 2 * (ranks - 1) / ranks * sum(values_layout(wire, block).words for block in blocks)


class CodedValues(CodedEntries):
    """The values of entries, on a wire of their own.

    Arguments as of CodedEntries; the name is any in `collectives.codec.WIRES`.
    """

    def __init__(
        self, name: str, kernels: Any, workspace: Workspace, ranks: int, names: Sequence[int] | None = None
    ) -> None:
        super().__init__(name, kernels, workspace, ranks, names, _BITS[name])

    def encode_values(self, entries: Entries, wire: Entries, dest: int) -> None:
        """Fill the wire array of a list; where the wire rounds, the values become their errors."""
        if len(entries):
            layout = values_layout(self.name, len(entries))
            self._kernels.encode_values(entries, wire, layout, self.rounds, self._report[dest])

    def add_values(self, wire: Entries, out: Entries, source: int) -> None:
        """Add what a rank encoded to ENTRY[count]. Does not wait for a device; see `damaged`."""
        self._decode_values(wire, out, True, self._report[source, DAMAGED : DAMAGED + 1])

    def write_values(self, wire: Entries, out: Entries, source: int) -> None:
        """Write what a rank encoded to the values of ENTRY[count]. Does not wait for a device."""
        self._decode_values(wire, out, False, self._report[source, NONFINITE : NONFINITE + 1])

    def _decode_values(self, wire: Any, out: Any, add: bool, report: NDArray[np.float64]) -> None:
        if len(out):
            self._kernels.decode_values(wire, values_layout(self.name, len(out)), out, add, report)

    def wait_for_nonfinite(self) -> bool:
        """Whether a value that was written since `start` is Inf or NaN. Waits for the device."""
        self._kernels.wait()
        return bool(self._report[:, NONFINITE].any())


def sum_values(
    own: Entries,
    sums: Entries,
    transport: Transport,
    codec: CodedValues,
    bucket_rounds: int = 8,
    rotate: bool = True,
) -> Entries:
    """Sum this rank's values and the others'. Collective.

    Every rank sums a block, in rotation order (own, r-1, r-2, ...), and all gather the blocks, so
    that all hold the same bits.

    Args:
        own: ENTRY[u], this rank's values, finite. With a wire that rounds they become their errors.
        sums: ENTRY[u], apart from `own`; its values become the sums, its indices stay. Where
            `codec.wait_for_nonfinite` they are not finite, on all ranks alike; so it is where a
            rank received values that are not.
        codec: equal on all ranks; `start` is called.
        bucket_rounds, rotate: as of `split_and_reduce`.

    Returns:
        What rounding took from this rank's block of the sums, ENTRY[...]; valid until the next call.

    Traffic: 2(P-1)/P·u values of the wire's bits, see `value_words`; P - 1 + ceil(log2 P)
        messages. Control: none.
    Source: own; as a dense allreduce by a reduce-scatter and an allgatherv.
    """
    rank, size = transport.rank, transport.size
    lengths = np.diff(_boundaries(len(own), size)).tolist()
    sizes = [values_layout(codec.name, length).words // 2 for length in lengths]
    parts, block = slices(own, lengths), transport.workspace.entries("region sums", lengths[rank])
    codec.start()
    codec.keep(parts[rank], block)
    dests = [(rank + i) % size if rotate else other_rank(rank, i) for i in range(1, size)]
    sources = [(rank - i) % size if rotate else other_rank(rank, i) for i in range(1, size)]
    in_order = [sizes[dest] for dest in dests]
    outgoing = slices(codec.buffer("outgoing wires", own, sum(in_order)), in_order)
    incoming = slices(
        codec.buffer("incoming wires", own, sizes[rank] * (size - 1)), [sizes[rank]] * (size - 1)
    )
    for dest, wire in zip(dests, outgoing, strict=True):
        codec.encode_values(parts[dest], wire, dest)
    rounds = [Round(*each) for each in zip(dests, outgoing, sources, incoming, strict=True)]
    for batch in transport.exchange(rounds, bucket_rounds):
        for i in batch if rotate else ():
            codec.add_values(incoming[i], block, sources[i])
    if not rotate:  # in the order of rotation all the same
        for i in range(1, size):
            source = (rank - i) % size
            codec.add_values(incoming[sources.index(source)], block, source)
    gathered = codec.buffer("gathered wires", sums, sum(sizes))
    wires = slices(gathered, sizes)
    codec.encode_values(block, wires[rank], rank)
    allgatherv(gathered, np.array(sizes), transport)
    for source, (wire, out) in enumerate(zip(wires, slices(sums, lengths), strict=True)):
        codec.write_values(wire, out, source)
    return block


def _boundaries(count: int, ranks: int) -> NDArray[np.int64]:
    """int64[P + 1], where the ranks' blocks begin and end."""
    return count * np.arange(ranks + 1, dtype=np.int64) // ranks
