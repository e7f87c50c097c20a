"""Host kernels that add a gradient to the residual and select from it in one pass, whatever the gradient is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import carray, types
from numba.extending import register_jitable
from numpy.typing import NDArray

from collectives.cpu.compiled import ENTRIES, FLOAT, INT, VECTOR, compiled
from collectives.cpu.lanes import (
    LANES,
    LINE,
    add,
    choose,
    count,
    floats_at,
    halves_at,
    load,
    lowest,
    multiply,
    prefetch,
    reaching,
    spread,
    store,
    subtract,
)
from oktopk.displacement import ParameterDisplacement

BLOCK = 4096
"""Elements that stay in the first-level cache; a list to pack into needs this many spare entries at its end."""

TIED = 2**31 - 1
"""Instead of a count of candidates: many of them equal the k-th largest magnitude."""

PIECE = 1024  # elements of a displacement that stay in the first-level cache with all that they are made of
AHEAD = 512  # elements that memory is asked for before they are read
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_SPANS = types.int64[:, ::1]
FLOAT32, _BFLOAT16, _FLOAT16 = range(3)  # of a parameter's elements
KINDS = {"float32": FLOAT32, "bfloat16": _BFLOAT16, "float16": _FLOAT16}
_SMALLEST_HALF = np.int32(0x38800000)  # the smallest normal float16, as bits of a float32
_TOO_LARGE_HALF = np.int32(0x47800000)  # 65536, likewise


@dataclass(slots=True)
class Packing:
    """The outcome of `accumulate_select`.

    Attributes:
        nnz: elements that reach the threshold, packed or not.
        nonfinite: elements whose sum is NaN or Inf; never packed.
        offsets: int64[P + 1], where each region begins in the list, if that was found on the way.
        splits: int64[P - 1], the indices that split a list that is not empty into equal counts, likewise.
        candidates: entries that a device has cut the list down from to the top k; 0 where it is as it was packed.
        cut_bits: the k-th largest magnitude, where the list was cut.
    """

    nnz: int
    nonfinite: int
    offsets: Sequence[int] | NDArray[np.int64] | None = None
    splits: NDArray[np.int64] | None = None
    candidates: int = 0
    cut_bits: int = 0


@dataclass(frozen=True, slots=True)
class ShardSum:
    """One shard of the sum of several gradients, added up in their order where a kernel reads it.

    Attributes:
        gradients: float32[G, n or more], C-contiguous.
        block, shards, shard: of the block-cyclic layout, as `oktopk.levels.Layout`.
        out: float32[elements of the shard], where `summed` writes.
    """

    gradients: NDArray[np.float32]
    block: int
    shards: int
    shard: int
    out: NDArray[np.float32]

    def summed(self) -> NDArray[np.float32]:
        """The sum as one vector."""
        sum_shard(self.gradients, self.block, self.shards, self.shard, self.out)
        return self.out


def accumulate_select(
    gradient: NDArray[np.float32] | ShardSum | HostMoves,
    residual: NDArray[np.float32],
    threshold_bits: int,
    entries: NDArray[np.void],
    boundaries: NDArray[np.int64] | None = None,
) -> Packing:
    """Add the gradient to the residual and pack what reaches a threshold, in one pass.

    Args:
        gradient: float32[n], a sum of n elements or a displacement; read.
        residual: float32[n]; becomes gradient + residual, except where that is NaN or Inf: there it stays.
        threshold_bits: bits of the smallest magnitude to pack, >= 1.
        entries: ENTRY[capacity + BLOCK], filled in ascending index order; what does not fit is counted, not packed.
        boundaries: int64[P + 1], regions whose beginning in the list a device finds on the way; of no use here.

    Returns:
        What was packed; the list is whole when nnz <= capacity.

    Memory traffic: 12n bytes; of a sum of G gradients 4n (G - 1) more, of a displacement the parameters.
    """
    threshold = np.int32(threshold_bits)
    if isinstance(gradient, HostMoves):
        return Packing(*gradient.accumulate(residual, threshold, entries))
    if isinstance(gradient, ShardSum):
        layout = gradient.gradients, gradient.block, gradient.shards, gradient.shard
    else:
        layout = gradient[np.newaxis], max(1, len(gradient)), 1, 0
    return Packing(*_accumulate_select(*layout, residual, threshold, entries))


@compiled((types.float32[:, ::1], INT, INT, INT, VECTOR, types.int32, ENTRIES))
def _accumulate_select(rows, block, shards, shard, residual, threshold, entries):  # type: ignore[no-untyped-def]
    values, stride = rows.reshape(-1), rows.shape[1]
    rest = np.empty((len(rows) + 1) * LANES, np.float32)
    packed = nonfinite = 0
    for begin in range(0, len(residual), block):
        stop = min(begin + block, len(residual))
        moved = (begin // block * shards + shard) * block - begin  # from the shard to the vector
        packed, bad = accumulate_range(
            values, moved, stride, len(rows), residual, begin, stop, threshold, entries, packed, rest
        )
        nonfinite += bad
    return packed, nonfinite


@register_jitable
def accumulate_range(values, moved, stride, rows, residual, begin, stop, threshold, entries, packed, rest):  # type: ignore[no-untyped-def]
    """Add the sums of rows, values[row · stride + moved + i], to residual[begin : stop], and pack behind what is packed.

    Args:
        rest: float32[(rows + 1) LANES], for what is left of a range, padded with zeros: the rows, then the residual.
    """
    nonfinite = 0
    for start in range(begin, stop, LANES):
        size = min(LANES, stop - start)
        if size == LANES:
            mask, excess = _accumulate_lanes(values, start + moved, stride, rows, residual, start, threshold)
        else:
            rest[:] = 0
            for row in range(rows):
                at = row * stride + start + moved
                rest[row * LANES : row * LANES + size] = values[at : at + size]
            kept = rest[rows * LANES :]
            kept[:size] = residual[start:stop]
            mask, excess = _accumulate_lanes(rest, 0, LANES, rows, kept, 0, threshold)
            residual[start:stop] = kept[:size]
        nonfinite += count(excess)
        if packed > len(entries) - BLOCK:
            packed += count(mask)
            continue
        while mask:
            at = start + lowest(mask)
            entries[packed].index = at
            entries[packed].value = residual[at]
            packed += 1
            mask &= mask - np.uint64(1)
    return packed, nonfinite


@register_jitable
def _accumulate_lanes(values, at, stride, rows, residual, to, threshold):  # type: ignore[no-untyped-def]
    """Add LANES sums to the residual. Returns the lanes that reach the threshold, and those that are not finite."""
    for ahead in range(AHEAD, AHEAD + LANES, LINE):
        prefetch(residual, to + ahead)
        for row in range(rows):
            prefetch(values, at + row * stride + ahead)
    before, total = load(residual, to), load(values, at)
    for row in range(1, rows):
        total = add(total, load(values, at + row * stride))
    total = add(total, before)
    excess = reaching(total, _INFINITY)
    store(residual, to, choose(excess, before, total))
    return reaching(total, threshold) & ~excess, excess


@compiled((types.float32[:, ::1], INT, INT, INT, VECTOR))
def sum_shard(
    gradients: NDArray[np.float32], block: int, shards: int, shard: int, out: NDArray[np.float32]
) -> None:
    """Sum one shard of several gradients, in their order.

    Args:
        gradients: float32[G, n or more].
        block, shards, shard: of the block-cyclic layout, as `oktopk.levels.Layout`.
        out: float32[elements of the shard].

    Memory traffic: 4 (G + 1) bytes an element of the shard; the sums of a piece stay in the first-level cache.
    """
    for begin in range(0, len(out), block):
        first = (begin // block * shards + shard) * block
        stop = min(begin + block, len(out))
        for start in range(begin, stop, BLOCK):
            size = min(BLOCK, stop - start)
            total = out[start : start + size]
            total[:] = gradients[0, first + start - begin : first + start - begin + size]
            for row in range(1, len(gradients)):
                added = gradients[row, first + start - begin : first + start - begin + size]
                for i in range(size):
                    total[i] += added[i]


class HostMoves(ABC):
    """A displacement in host memory, which a kernel of its own adds to the residual.

    Args:
        sizes: elements of the parameters, in the order of the vectors; may be 0.
        addresses: of each parameter that kernels take.
    """

    def __init__(self, sizes: Sequence[int], addresses: int) -> None:
        counts = np.asarray(sizes, np.int64)
        self.length = int(counts.sum())
        self._filled = np.flatnonzero(counts)
        self._spans = np.zeros((len(self._filled) + 1, 1 + addresses), np.int64)  # begin, addresses
        self._spans[:-1, 0], self._spans[-1, 0] = (counts.cumsum() - counts)[self._filled], self.length

    @abstractmethod
    def accumulate(
        self, residual: NDArray[np.float32], threshold: np.int32, entries: NDArray[np.void]
    ) -> tuple[int, int]:
        """As `accumulate_select`. Returns elements that reach the threshold, and those that are not finite."""


class HostDisplacement(HostMoves, ParameterDisplacement):
    """A displacement of parameters in host memory.

    Args:
        sizes: as HostMoves.
        element_type: of the parameters: "float32", "bfloat16" or "float16".
        reference: float32[n], its memory.
        share: of the residual.

    Attributes:
        layout: what kernels take.
    """

    def __init__(
        self, sizes: Sequence[int], element_type: str, reference: NDArray[np.float32], share: float
    ) -> None:
        super().__init__(sizes, addresses=1)
        self.layout = self._spans, KINDS[element_type], reference, share

    def accumulate(
        self, residual: NDArray[np.float32], threshold: np.int32, entries: NDArray[np.void]
    ) -> tuple[int, int]:
        packed, nonfinite = _accumulate_displaced(*self.layout, residual, threshold, entries)
        return packed, nonfinite

    def set_pointers(self, addresses: Sequence[int]) -> None:
        self._spans[:-1, 1] = np.array(addresses, np.int64)[self._filled]

    def set_share(self, share: float) -> None:
        self.layout = *self.layout[:-1], share

    def show(self, residual: NDArray[np.float32], factors: Sequence[float] | None = None) -> None:
        every = np.ones(len(self._filled), np.float32)
        if factors is not None:
            every[:] = np.asarray(factors, np.float32)[self._filled]
        _show(*self.layout, residual, every)


@compiled((_SPANS, INT, VECTOR, FLOAT, VECTOR, types.int32, ENTRIES))
def _accumulate_displaced(spans, kind, reference, share, residual, threshold, entries):  # type: ignore[no-untyped-def]
    present, moved = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    rest = np.empty(2 * LANES, np.float32)
    factor = np.float32(share)
    packed = nonfinite = 0
    for tensor in range(len(spans) - 1):
        begin, end, address = spans[tensor, 0], spans[tensor + 1, 0], spans[tensor, 1]
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            size = stop - start
            if address:
                _shown(reference[start:stop], factor, residual[start:stop], kind, moved)
                if kind == FLOAT32:
                    _subtract(moved, carray(floats_at(address + 4 * (start - begin)), size), size)
                else:
                    widen(carray(halves_at(address + 2 * (start - begin)), size), kind, present)
                    _subtract(moved, present, size)
            else:
                moved[:] = 0
            packed, bad = accumulate_range(
                moved, -start, PIECE, 1, residual, start, stop, threshold, entries, packed, rest
            )
            nonfinite += bad
    return packed, nonfinite


@compiled((_SPANS, INT, VECTOR, FLOAT, VECTOR, VECTOR))
def _show(spans, kind, reference, share, residual, factors):  # type: ignore[no-untyped-def]
    shown = np.empty(PIECE, np.float32)
    factor = np.float32(share)
    for tensor in range(len(spans) - 1):
        begin, end, address = spans[tensor, 0], spans[tensor + 1, 0], spans[tensor, 1]
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            size = stop - start
            if factors[tensor] != 1:
                _multiply(reference[start:stop], factors[tensor])
            if not address:
                continue
            if kind == FLOAT32:
                _shown(
                    reference[start:stop], factor, residual[start:stop], kind,
                    carray(floats_at(address + 4 * (start - begin)), size),
                )  # fmt: skip
            else:
                _shown(reference[start:stop], factor, residual[start:stop], kind, shown)
                narrow(shown, kind, carray(halves_at(address + 2 * (start - begin)), size))


@register_jitable
def _multiply(vector, factor):  # type: ignore[no-untyped-def]
    whole, factors = len(vector) - len(vector) % LANES, spread(factor)
    for i in range(0, whole, LANES):
        for ahead in range(i + AHEAD, i + AHEAD + LANES, LINE):
            prefetch(vector, ahead)
        store(vector, i, multiply(load(vector, i), factors))
    for i in range(whole, len(vector)):
        vector[i] *= factor


@register_jitable
def _subtract(vector, other, size):  # type: ignore[no-untyped-def]
    """The first elements of a vector, less those of another one."""
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        for ahead in range(i + AHEAD, i + AHEAD + LANES, LINE):
            prefetch(other, ahead)
        store(vector, i, subtract(load(vector, i), load(other, i)))
    for i in range(whole, size):
        vector[i] -= other[i]


@register_jitable
def _shown(reference, factor, residual, kind, out):  # type: ignore[no-untyped-def]
    """out = round(reference - factor · residual), which a parameter of this kind can hold, as float32."""
    size = len(reference)
    whole, factors = size - size % LANES, spread(factor)
    for i in range(0, whole, LANES):
        for ahead in range(i + AHEAD, i + AHEAD + LANES, LINE):
            prefetch(reference, ahead)
            prefetch(residual, ahead)
        store(out, i, subtract(load(reference, i), multiply(factors, load(residual, i))))
    for i in range(whole, size):
        out[i] = reference[i] - factor * residual[i]
    round_to(kind, out[:size])


@register_jitable
def round_to(kind, out):  # type: ignore[no-untyped-def]
    """Round float32 to what an element of this kind can hold, to nearest even."""
    if kind == FLOAT32:
        return
    size, bits = len(out), out.view(np.int32)
    if kind == _BFLOAT16:
        for i in range(size):
            b = bits[i]
            nearest = (b + np.int32(0x7FFF) + ((b >> np.int32(16)) & np.int32(1))) & np.int32(-0x10000)
            bits[i] = nearest if b & _MAGNITUDE <= _INFINITY else b | np.int32(0x400000)
        return
    for i in range(size):
        m, sign = bits[i] & _MAGNITUDE, bits[i] & ~_MAGNITUDE
        if m < _SMALLEST_HALF:  # to a multiple of 2^-24
            out[i] = (abs(out[i]) + np.float32(0.5)) - np.float32(0.5)
            bits[i] |= sign
        elif m <= _INFINITY:
            nearest = (m + np.int32(0xFFF) + ((m >> np.int32(13)) & np.int32(1))) & np.int32(-0x2000)
            bits[i] = (nearest if nearest < _TOO_LARGE_HALF else _INFINITY) | sign


@register_jitable
def narrow(values, kind, out):  # type: ignore[no-untyped-def]
    """The bits of values that `round_to` has rounded, as uint16."""
    bits = values.view(np.int32)
    for i in range(len(out)):
        b = bits[i]
        if kind == _BFLOAT16:
            out[i] = (b >> np.int32(16)) & np.int32(0xFFFF)
            continue
        m = b & _MAGNITUDE
        if m < _SMALLEST_HALF:
            half = np.int32(abs(values[i]) * np.float32(2.0**24))
        elif m < _TOO_LARGE_HALF:
            half = (m - np.int32(112 << 23)) >> np.int32(13)
        else:
            half = np.int32(0x7C00) if m <= _INFINITY else np.int32(0x7E00)
        out[i] = ((b >> np.int32(16)) & np.int32(0x8000)) | half


@register_jitable
def widen(halves, kind, out):  # type: ignore[no-untyped-def]
    """The values of uint16 bits, as float32."""
    bits = out.view(np.int32)
    for i in range(len(halves)):
        h = np.int32(halves[i])
        if kind == _BFLOAT16:
            bits[i] = h << np.int32(16)
            continue
        m, sign = h & np.int32(0x7FFF), (h & np.int32(0x8000)) << np.int32(16)
        if m < 0x400:
            out[i] = np.float32(m) * np.float32(2.0**-24)
            bits[i] |= sign
        else:
            exponent = np.int32(112 << 23) if m < 0x7C00 else np.int32(224 << 23)
            bits[i] = ((m << np.int32(13)) + exponent) | sign
