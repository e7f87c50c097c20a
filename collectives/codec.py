"""Codecs: a list of entries as the bytes that travel, its wire array.

Both ends of a message know its bytes before it starts: `wire_bytes` computes them from the number of entries, which the
ranks exchange first, and from the range of their indices. So buffers fit, and bounds hold for any data. Wire arrays are
whole entries long (8 bytes), so that transports, workspaces and devices handle them as they handle entries.

Coded entries hold, in words of 4 bytes: for 8 and 4 bits two words a block of 256 values, the values, the low bits of the
indices, and a bitmap of their high bits (Elias-Fano: Elias, J. ACM 21, 1974; Fano, MIT memorandum 61, 1971). Entry i, whose
index is `lower` + offset, has the low `low_bits` of its offset at bit i·low_bits, and bit (offset >> low_bits) + i of the
bitmap is set. It decodes in parallel: the entry that a bit belongs to is the number of bits set before it. A list that coding
does not shorten travels as plain entries.

A wire that rounds keeps the sign, and no entry decodes to 0 or to Inf:

- bfloat16 rounds to nearest even; what would be 0 or Inf becomes the smallest or the largest finite magnitude.
- int8 and int4 are a sign and a code q in [0, Q], Q = 127 or 7. A block tells `low` and `high`, the bits of its least and its
  largest magnitude as float32. The code stands for the magnitude of bits low + (q·(high - low) + Q//2) // Q, which is linear
  in the bits and so nearly logarithmic in the magnitude. Of the two codes around a magnitude the nearer value is taken, of
  equally near ones the smaller. The error is thus smaller than the entry.

An entry of value 0, which no selection holds, counts as the smallest magnitude of the type.

Indices alone, whose values nobody reads, are the last two of these parts. They are never longer than plain entries.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import ENTRY, Entries, Kernels
from collectives.traffic import WORD_BYTES
from collectives.workspace import Workspace

VALUE_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
"""Wire -> bits of a coded value."""

WIRES = ("plain", *VALUE_BITS)
"""Names of codecs."""

EXACT_WIRES = ("plain", "float32")
"""Those that do not round: they give the same bits."""

ALONE = 1
"""Bits of a value, where indices travel alone: it decodes to 1."""

VALUE_BLOCK = 256
"""Values that share a least and a largest magnitude."""

DAMAGES = (
    "",
    "the bitmap holds another number of entries",
    "indices do not ascend within the region",
    "values or their range are not finite",
    "it has another number of bytes",
)
"""What can be wrong with a wire array, by number; 0 is nothing."""


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Where the parts of a wire array lie, in words of 4 bytes.

    Attributes:
        count: entries.
        lower, length: indices are in [lower, lower + length).
        bits: of a value; 0 for plain entries, ALONE for no values.
        low_bits: of an index that are stored as they are.
        values, lows, bitmap: first word of each part; the ranges of blocks are before the values.
        words: all of them, an even number.
    """

    count: int
    lower: int
    length: int
    bits: int
    low_bits: int = 0
    values: int = 0
    lows: int = 0
    bitmap: int = 0
    words: int = 0


@functools.lru_cache(1 << 13)  # a step asks for that of each list twice, and has lists of each rank
def wire_layout(bits: int, count: int, lower: int, upper: int) -> WireLayout:
    """The layout of `count` entries with indices in [lower, upper) and values of so many bits."""
    length = upper - lower
    plain = WireLayout(count, lower, length, 0, words=2 * count)
    if not count or length < count:
        return plain
    # what minimises low_bits + 1 + length / (count·2^low_bits)
    low_bits = max(0, ((length - 1) // count).bit_length() - 1)
    values = 2 * -(-count // VALUE_BLOCK) if ALONE < bits < 16 else 0
    lows = values + (-(-count * bits // 32) if bits > ALONE else 0)
    bitmap = lows + -(-count * low_bits // 32)
    end = bitmap + -(-(count + ((length - 1) >> low_bits) + 1) // 32)
    words = end + end % 2
    if words >= plain.words and bits != ALONE:
        return plain
    return WireLayout(count, lower, length, bits, low_bits, values, lows, bitmap, words)


class Codec:
    """Encodes entries on the device where they lie. Wire arrays are ENTRY[wire_bytes // 8].

    This one is plain: a wire array is the 8-byte COO entries themselves, and nothing is encoded, copied or lost. Others override
    all of it.

    Attributes:
        name: one of WIRES, equal on all ranks of an exchange.
        rounds: whether values arrive rounded. `encode` and `keep` then leave the rounding errors in the entries.
    """

    name = "plain"
    rounds = False

    def wire_bytes(self, count: int, lower: int, upper: int) -> int:
        """Bytes of `count` entries with indices in [lower, upper); a multiple of 8, at most 8·count."""
        return count * ENTRY.itemsize

    def buffer(self, name: str, entries: Entries, size: int) -> Entries:
        """ENTRY[size] for the wire arrays of these entries: scratch of that name, or the entries themselves."""
        return entries

    def start(self) -> None:
        """Forget what was rounded and damaged before this exchange."""

    def among(self, ranks: Sequence[int]) -> Codec:
        """The same for one of several exchanges of a step, each among some of the ranks and with none twice.

        What it rounds, and what is damaged, is noted with this codec, whose `start` begins all of them.
        """
        return self

    def encode(self, entries: Entries, lower: int, upper: int, wire: Entries, dest: int) -> None:
        """Fill the wire array of a list for a rank, or for all.

        Args:
            entries: ENTRY[count], ascending and finite, in [lower, upper).
            dest: the own rank for all.
        """

    def keep(self, entries: Entries, out: Entries) -> None:
        """Copy entries that stay on this rank."""
        out[:] = entries

    def decode(
        self, wire: Any, lower: int, upper: int, out: Entries, source: int, gathered: bool = False
    ) -> None:
        """Fill `out`, ENTRY[count], from the wire array that a rank encoded. Does not wait for a device.

        Bytes that are not those of `count` ascending finite entries in [lower, upper) are noted, see `take_damage`, and decode to
        entries of value 0 with indices within; those of another number of bytes to any entries with indices within.

        Args:
            gathered: in an allgatherv.
        """

    def cut_errors(self, kept: Entries, decoded: Entries) -> None:
        """kept.value -= decoded.value, elementwise; of a codec that rounds."""

    def check_gathered(self) -> None:
        """Raise ValueError for what was gathered and did not decode, unless a device may still be decoding."""

    @property
    def damaged(self) -> bool:
        """Whether a wire array that was not gathered did not decode. Known once the device was waited for, as the next three."""
        return False

    @property
    def gathered_damage(self) -> bool:
        """Whether one that was gathered did not."""
        return False

    def take_damage(self) -> str:
        """What did not decode since `start`, or was gathered since the last call, in a sentence; "" if all did."""
        return ""

    @property
    def rounding(self) -> tuple[float, float]:
        """Sum of the rounding errors' magnitudes since `start`, and that of what was encoded; zeros where nothing is rounded."""
        return 0.0, 0.0


PLAIN = Codec()

# columns of a codec's report, a row for each rank
_ERROR, _MASS, DAMAGED, _GATHERED, NONFINITE = range(5)
_WIDTH = len(DAMAGES) - 1


class CodedEntries(Codec):
    """Indices by Elias-Fano, values of 32, 16, 8 or 4 bits; see the head of this file.

    Args:
        name: a key of VALUE_BITS.
        kernels: that code, of the transport whose entries these are.
        workspace: of the transport.
        ranks: of the transport.
        names: int[ranks], what messages call them; None: by their numbers.
        bits: of a value; 0: those of the name.
    """

    def __init__(
        self,
        name: str,
        kernels: Kernels,
        workspace: Workspace,
        ranks: int,
        names: Sequence[int] | None = None,
        bits: int = 0,
    ) -> None:
        self._names = range(ranks) if names is None else names
        self.name = name
        self._bits, self._kernels, self._workspace = bits or VALUE_BITS[name], kernels, workspace
        self.rounds = name not in EXACT_WIRES and bits != ALONE
        self._report: NDArray[np.float64] = kernels.codec_report(ranks)
        self._report[:] = 0
        self._places: Sequence[int] = range(ranks)  # of the ranks of an exchange, in the report
        self._whole = True

    def among(self, ranks: Sequence[int]) -> CodedEntries:
        part = copy.copy(self)
        part._places, part._whole = ranks, False
        return part

    def wire_bytes(self, count: int, lower: int, upper: int) -> int:
        return WORD_BYTES * wire_layout(self._bits, count, lower, upper).words

    def buffer(self, name: str, entries: Entries, size: int) -> Entries:
        return self._workspace.entries(name, size)

    def start(self) -> None:
        if self._whole:
            self._report[:, :_GATHERED] = self._report[:, NONFINITE:] = 0

    def encode(self, entries: Entries, lower: int, upper: int, wire: Entries, dest: int) -> None:
        if len(entries):
            layout = wire_layout(self._bits, len(entries), lower, upper)
            report = self._report[self._places[dest]]
            self._kernels.encode_entries(entries, wire, layout, self.rounds, report)

    def keep(self, entries: Entries, out: Entries) -> None:
        out[:] = entries
        if self.rounds:
            self._kernels.cut_values(entries, out)

    def decode(
        self, wire: Any, lower: int, upper: int, out: Entries, source: int, gathered: bool = False
    ) -> None:
        layout = wire_layout(self._bits, len(out), lower, upper)
        at, source = _GATHERED if gathered else DAMAGED, self._places[source]
        fits = WORD_BYTES * layout.words == wire.nbytes
        if len(out):
            whole = wire if fits else self._workspace.entries("no wire array", layout.words // 2)
            self._kernels.decode_entries(whole, layout, out, self._report[source, at : at + 1])
        if not fits:  # a device may still replace it by what is wrong with `whole`
            self._report[source, at] = _WIDTH

    def cut_errors(self, kept: Entries, decoded: Entries) -> None:
        self._kernels.cut_values(kept, decoded)

    def check_gathered(self) -> None:
        if not self._kernels.ASYNCHRONOUS and (problem := self.take_damage()):
            raise ValueError(problem)

    @property
    def damaged(self) -> bool:
        return bool(self._report[:, DAMAGED].any())

    @property
    def gathered_damage(self) -> bool:
        return bool(self._report[:, _GATHERED].any())

    def take_damage(self) -> str:
        damages = self._report[:, DAMAGED:NONFINITE]
        worst = damages.max(axis=1).astype(int)
        damages[:] = 0
        ranks = [f"rank {self._names[rank]}: {DAMAGES[kind]}" for rank, kind in enumerate(worst) if kind]
        return f"{self.name} entries are damaged that came from {', '.join(ranks)}" if ranks else ""

    @property
    def rounding(self) -> tuple[float, float]:
        if self.rounds and self._kernels.ASYNCHRONOUS:
            self._kernels.finish_encoding()
        error, mass = self._report[:, [_ERROR, _MASS]].sum(axis=0)
        return float(error), float(mass)


class CodedIndices(CodedEntries):
    """Indices alone, likewise; values decode to 1.

    Args:
        values: the codec of other lists of the same step; what is damaged of either is known to both.
        kernels, workspace, ranks, names: as of CodedEntries.
    """

    def __init__(
        self,
        values: Codec,
        kernels: Kernels,
        workspace: Workspace,
        ranks: int,
        names: Sequence[int] | None = None,
    ) -> None:
        super().__init__(values.name, kernels, workspace, ranks, names, ALONE)
        if isinstance(values, CodedEntries):
            self._report = values._report


def make_codec(
    name: str, kernels: Any, workspace: Workspace, ranks: int, names: Sequence[int] | None = None
) -> Codec:
    """The codec of a name in WIRES; plain where nothing travels. Arguments as of CodedEntries."""
    if name == "plain" or ranks == 1:
        return PLAIN
    return CodedEntries(name, kernels, workspace, ranks, names)
