"""Host kernels that touch gradients: accumulate-select-pack and apply; histograms lie beside them.

All magnitudes are compared by bits, as in `collectives.cpu.kernels`. A vector is read and written once per call; no call
allocates more than a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from collectives.cpu.compiled import BOOL, ENTRIES, FLOAT, INT, NONE, VECTOR, compiled
from collectives.cpu.lanes import LANES, LINE, add, choose, count, load, lowest, prefetch, reaching, store
from oktopk.cpu.histograms import (  # noqa: F401 - of these kernels, too
    LEVELS,
    magnitude_histogram,
    top_histogram,
    words_of,
)

BLOCK = 4096
"""Elements that stay in the first-level cache; a list to pack into needs this many spare entries at its end."""

_AHEAD = 512  # elements that memory is asked for before they are read
_SOON = 32  # entries likewise
_TILE = 1 << 15  # elements whose flags stay in the second-level cache
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_HALF_OF_LARGEST = np.float32(2.0**127)
_FAR_FROM_LARGEST = np.float32(2.0**100)
_LEAST_LOSS = np.float32(2.0**-24)  # of a momentum that is 1 in float32


@dataclass(slots=True)
class Packing:
    """The outcome of `accumulate_select`.

    Attributes:
        nnz: elements that reach the threshold, packed or not.
        nonfinite: elements whose sum is NaN or Inf; never packed.
        offsets: int64[P + 1], where each region begins in the list, if that was found on the way.
    """

    nnz: int
    nonfinite: int
    offsets: Any = None


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
    gradient: NDArray[np.float32] | ShardSum,
    residual: NDArray[np.float32],
    threshold_bits: int,
    entries: NDArray[np.void],
    boundaries: NDArray[np.int64] | None = None,
) -> Packing:
    """Add the gradient to the residual and pack what reaches a threshold, in one pass.

    Args:
        gradient: float32[n], or a sum of n elements; read.
        residual: float32[n]; becomes gradient + residual, except where that is NaN or Inf: there it stays.
        threshold_bits: bits of the smallest magnitude to pack, >= 1.
        entries: ENTRY[capacity + BLOCK], filled in ascending index order; what does not fit is counted, not packed.
        boundaries: int64[P + 1], regions whose beginning in the list a device finds on the way; of no use here.

    Returns:
        What was packed; the list is whole when nnz <= capacity.

    Memory traffic: 12n bytes; of a sum of G gradients 4n (G - 1) more.
    """
    if isinstance(gradient, ShardSum):
        layout = gradient.gradients, gradient.block, gradient.shards, gradient.shard
    else:
        layout = gradient[np.newaxis], max(1, len(gradient)), 1, 0
    return Packing(*_accumulate_select(*layout, residual, np.int32(threshold_bits), entries))


@compiled((types.float32[:, ::1], INT, INT, INT, VECTOR, types.int32, ENTRIES))
def _accumulate_select(rows, block, shards, shard, residual, threshold, entries):  # type: ignore[no-untyped-def]
    values, stride = rows.reshape(-1), rows.shape[1]
    # what is left of a block, padded with zeros: the rows, then the residual
    rest = np.zeros((len(rows) + 1) * LANES, np.float32)
    packed = nonfinite = 0
    for begin in range(0, len(residual), block):
        stop = min(begin + block, len(residual))
        moved = (begin // block * shards + shard) * block - begin  # from the shard to the vector
        for start in range(begin, stop, LANES):
            size = min(LANES, stop - start)
            if size == LANES:
                mask, excess = _accumulate_lanes(
                    values, start + moved, stride, len(rows), residual, start, threshold
                )
            else:
                rest[:] = 0
                for row in range(len(rows)):
                    at = row * stride + start + moved
                    rest[row * LANES : row * LANES + size] = values[at : at + size]
                kept = rest[len(rows) * LANES :]
                kept[:size] = residual[start:stop]
                mask, excess = _accumulate_lanes(rest, 0, LANES, len(rows), kept, 0, threshold)
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
    for ahead in range(_AHEAD, _AHEAD + LANES, LINE):
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


@compiled((VECTOR, VECTOR))
def accumulate_moments(
    gradient: NDArray[np.float32], residual: NDArray[np.float32]
) -> tuple[float, float, int]:
    """Add the gradient to the residual, and sum it up on the way.

    Args:
        gradient, residual: float32[n], as in `accumulate_select`.

    Returns:
        (total, squares, nonfinite): sum and sum of squares of the finite sums, in float64, and how many are not finite.
    """
    total = squares = 0.0
    nonfinite = 0
    for start in range(0, len(gradient), BLOCK):
        size = min(BLOCK, len(gradient) - start)
        g, e = gradient[start : start + size], residual[start : start + size]
        # eight partial sums: one alone would wait for itself at every element
        partial = np.zeros(8, np.float64)
        partial_squares = np.zeros(8, np.float64)
        finite = True
        for i in range(size):
            finite &= np.isfinite(g[i] + e[i])
        if finite:
            for i in range(size):
                x = g[i] + e[i]
                e[i] = x
                partial[i & 7] += x
                partial_squares[i & 7] += np.float64(x) * x
        else:
            for i in range(size):
                x = g[i] + e[i]
                if np.isfinite(x):
                    e[i] = x
                    partial[0] += x
                    partial_squares[0] += np.float64(x) * x
                else:
                    nonfinite += 1
        total += partial.sum()
        squares += partial_squares.sum()
    return total, squares, nonfinite


def undo_accumulate(
    gradient: NDArray[np.float32] | ShardSum, residual: NDArray[np.float32], all_added: bool = False
) -> None:
    """Take the gradient back out of the residual, where `accumulate_select` put it in; exact to rounding.

    Args:
        all_added: every sum was finite. Else an element above half the largest float may stay in the residual: it could
            be one that was never added.
    """
    _undo_accumulate(gradient.summed() if isinstance(gradient, ShardSum) else gradient, residual, all_added)


@compiled((VECTOR, VECTOR, BOOL))
def _undo_accumulate(gradient, residual, all_added):  # type: ignore[no-untyped-def]
    for i in range(len(gradient)):
        if all_added or (np.isfinite(gradient[i]) and np.isfinite(gradient[i] + residual[i])):
            residual[i] -= gradient[i]


@compiled((VECTOR, NONE, VECTOR), (VECTOR, VECTOR, VECTOR))
def accumulate(
    gradient: NDArray[np.float32], residual: NDArray[np.float32] | None, out: NDArray[np.float32]
) -> int:
    """out = gradient + residual, all float32[n]; a residual of None counts as zero.

    Returns:
        Elements of `out` that are not finite.
    """
    nonfinite = 0
    for i in range(len(gradient)):
        out[i] = gradient[i] if residual is None else gradient[i] + residual[i]
        nonfinite += not np.isfinite(out[i])
    return nonfinite


@register_jitable
def _with_momentum(factor: Any, velocity: Any, gradient: Any, residual: Any) -> tuple[Any, bool]:
    """The velocity that follows, and whether it may: what never leaves the residual must not grow out of the floats' range.

    An entry that cancels over the ranks is not applied, and its velocity adds up in the residual: with no further gradient to
    residual + velocity / (1 - factor). Above half the largest float a gradient must not add to that.
    """
    kept = factor * velocity
    moved = kept + gradient
    gain = np.float32(1) / max(np.float32(1) - factor, _LEAST_LOSS)
    if abs(moved) * gain <= _FAR_FROM_LARGEST:
        return moved, True
    reach = abs(residual + moved * gain)
    return moved, reach <= _HALF_OF_LARGEST or (np.isfinite(moved) and reach <= abs(residual + kept * gain))


@compiled((VECTOR, VECTOR, NONE, FLOAT), (VECTOR, VECTOR, VECTOR, FLOAT))
def accumulate_momentum(
    gradient: NDArray[np.float32],
    velocity: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    momentum: float,
) -> int:
    """velocity = momentum * velocity + gradient, all float32[n], except where that is not finite or would not remain so.

    Args:
        residual: that the velocity will be added to, step after step, where it is not applied; None counts as zero.

    Returns:
        Elements that stay as they were.
    """
    factor, stay = np.float32(momentum), 0
    for i in range(len(gradient)):
        held = np.float32(0) if residual is None else residual[i]
        moved, may_move = _with_momentum(factor, velocity[i], gradient[i], held)
        if may_move:
            velocity[i] = moved
        else:
            stay += 1
    return stay


@compiled((VECTOR, VECTOR, NONE, FLOAT, BOOL), (VECTOR, VECTOR, VECTOR, FLOAT, BOOL))
def undo_momentum(
    gradient: NDArray[np.float32],
    velocity: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    momentum: float,
    all_moved: bool = False,
) -> None:
    """Take one `accumulate_momentum` back, exact to rounding; momentum is not 0.

    Args:
        residual: as there.
        all_moved: none stayed as it was, as for `undo_accumulate`.
    """
    factor = np.float32(momentum)
    for i in range(len(gradient)):
        held = np.float32(0) if residual is None else residual[i]
        if all_moved or _with_momentum(factor, velocity[i], gradient[i], held)[1]:  # else it did not move
            velocity[i] = (velocity[i] - gradient[i]) / factor


@compiled((VECTOR, INT, INT, ENTRIES))
def select_at_least(
    vector: NDArray[np.float32], threshold_bits: int, ties: int, entries: NDArray[np.void]
) -> int:
    """Pack the elements of float32[n] whose magnitude reaches a threshold, in ascending index order.

    Args:
        threshold_bits: bits of the smallest magnitude to pack, >= 1.
        ties: how many of exactly that magnitude to pack; the lowest indices win.
        entries: ENTRY[capacity]; what does not fit is counted, not packed.

    Returns:
        Elements that reach the threshold, without the ties beyond `ties`.
    """
    vector_bits, threshold = vector.view(np.int32), np.int32(threshold_bits)
    rest = np.zeros(LANES, np.float32)  # what is left of the vector, padded with zeros
    packed = 0
    for start in range(0, len(vector), LANES):
        size = min(LANES, len(vector) - start)
        if size < LANES:
            rest[:size] = vector[start:]
        mask = reaching(load(vector, start) if size == LANES else load(rest, 0), threshold)
        while mask:
            at = start + lowest(mask)
            mask &= mask - np.uint64(1)
            if vector_bits[at] & _MAGNITUDE == threshold:
                if ties <= 0:
                    continue
                ties -= 1
            if packed < len(entries):
                entries[packed].index = at
                entries[packed].value = vector[at]
            packed += 1
    return packed


def count_nonfinite(values: NDArray[np.float32] | NDArray[np.void]) -> int:
    """Elements of float32[n], or values of ENTRY[n], that are NaN or Inf."""
    return _count_nonfinite(words_of(values))


@compiled((types.int32[::1],), (types.int32[:],))
def _count_nonfinite(words):  # type: ignore[no-untyped-def]
    # the largest magnitude of each block first: that loop runs on vectors
    count = 0
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        largest = np.int32(0)
        for i in range(len(block)):
            largest = max(largest, block[i] & _MAGNITUDE)
        if largest >= _INFINITY:
            for i in range(len(block)):
                count += (block[i] & _MAGNITUDE) >= _INFINITY
    return count


@compiled((VECTOR, ENTRIES, ENTRIES, BOOL))
def clear_common(
    vector: NDArray[np.float32], mine: NDArray[np.void], theirs: NDArray[np.void], keep_values: bool = False
) -> None:
    """Zero float32[n] at the indices that occur in both of two sorted lists, ENTRY[...] each.

    Args:
        keep_values: write the values of `mine` instead of zeros.
    """
    # tile by tile through flags in the cache: a merge would wait for its last comparison at every entry
    flags = np.zeros(_TILE, np.uint8)
    common = np.empty(_TILE + 1, np.int64)  # positions in `mine`
    i = j = 0
    while i < len(mine) and j < len(theirs):
        start = min(mine[i].index, theirs[j].index)
        stop = np.int64(start) + _TILE
        first, found = j, 0
        while j < len(theirs) and theirs[j].index < stop:
            flags[theirs[j].index - start] = 1
            j += 1
        while i < len(mine) and mine[i].index < stop:
            common[found] = i
            found += flags[mine[i].index - start]
            i += 1
        for at in range(found):
            prefetch(vector, mine[common[min(at + _SOON, found - 1)]].index)
            entry = mine[common[at]]
            vector[entry.index] = entry.value if keep_values else np.float32(0)
        for at in range(first, j):
            flags[theirs[at].index - start] = 0


@register_jitable
def _prefetch_soon(vector, entries, at):  # type: ignore[no-untyped-def]
    """Ask for the element of an entry that comes soon: each lies in a cache line of its own, which takes long to come."""
    prefetch(vector, entries[min(at + _SOON, len(entries) - 1)].index)


@compiled((VECTOR, ENTRIES))
def clear_support(vector: NDArray[np.float32], entries: NDArray[np.void]) -> None:
    """Zero float32[n] where `entries` has an index."""
    for at in range(len(entries)):
        _prefetch_soon(vector, entries, at)
        vector[entries[at].index] = 0


@compiled((VECTOR, ENTRIES, FLOAT))
def write_scaled(vector: NDArray[np.float32], entries: NDArray[np.void], scale: float) -> None:
    """vector[index] = value * scale, for every entry."""
    factor = np.float32(scale)
    for at in range(len(entries)):
        _prefetch_soon(vector, entries, at)
        vector[entries[at].index] = entries[at].value * factor


@compiled((VECTOR, ENTRIES))
def add_entries(vector: NDArray[np.float32], entries: NDArray[np.void]) -> None:
    """vector[index] += value, for every entry."""
    for at in range(len(entries)):
        _prefetch_soon(vector, entries, at)
        vector[entries[at].index] += entries[at].value


def write_block_scaled(block: NDArray[np.void], scale: float, out: NDArray[np.float32]) -> None:
    """out = values * scale, where ENTRY[ceil(m / 2)] holds float32[m] values, and out is float32[m]."""
    np.multiply(block.view(np.float32)[: len(out)], np.float32(scale), out=out)


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


@compiled((ENTRIES, INT, INT, INT))
def to_whole_indices(entries: NDArray[np.void], block: int, shards: int, shard: int) -> None:
    """Turn the indices of ENTRY[nnz] in a shard into those of the same elements in the whole vector, in place."""
    for at in range(len(entries)):
        index = np.int64(entries[at].index)
        entries[at].index = index + index // block * block * (shards - 1) + shard * block


def set_values(entries: NDArray[np.void], value: float) -> None:
    """Give all of ENTRY[nnz] this value."""
    entries["value"] = value


@compiled((VECTOR, ENTRIES, INT, ENTRIES))
def take_values(
    vector: NDArray[np.float32], support: NDArray[np.void], threshold_bits: int, out: NDArray[np.void]
) -> int:
    """Pack the elements of float32[n] at the indices of a list whose magnitude reaches a threshold, in order.

    Args:
        support: ENTRY[u], whose indices count.
        threshold_bits: bits of the smallest magnitude to pack, >= 1.
        out: ENTRY[u], apart from `support`; its indices become positions in `support`.

    Returns:
        Entries packed.
    """
    vector_bits, threshold, taken = vector.view(np.int32), np.int32(threshold_bits), 0
    for at in range(len(support)):
        _prefetch_soon(vector, support, at)
        index = support[at].index
        # without a branch: the next entry overwrites one that does not reach it
        out[taken].index = at
        out[taken].value = vector[index]
        taken += (vector_bits[index] & _MAGNITUDE) >= threshold
    return taken


@compiled((ENTRIES, ENTRIES))
def to_indices(entries: NDArray[np.void], support: NDArray[np.void]) -> None:
    """Turn the indices of ENTRY[nnz], positions in a list, into the indices that this list has there, in place."""
    for at in range(len(entries)):
        entries[at].index = support[entries[at].index].index
