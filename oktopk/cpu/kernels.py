"""Host kernels that touch gradients: apply, undo and select; accumulate-select-pack and histograms lie beside them.

All magnitudes are compared by bits, as in `collectives.cpu.kernels`. A vector is read and written once per call; no call
allocates more than a block.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from collectives.cpu.compiled import BOOL, ENTRIES, FLOAT, INT, NONE, VECTOR, compiled
from collectives.cpu.lanes import LANES, load, lowest, prefetch, reaching
from oktopk.cpu.accumulate import (  # noqa: F401 - of these kernels, too
    BLOCK,
    HostDisplacement,
    Packing,
    ShardSum,
    accumulate_select,
    sum_shard,
)
from oktopk.cpu.adamw import HostAdamW
from oktopk.cpu.histograms import (  # noqa: F401 - likewise
    LEVELS,
    magnitude_histogram,
    top_histogram,
    words_of,
)
from oktopk.displacement import Displacement

displacement, adamw_displacement = HostDisplacement, HostAdamW
"""As `GradientAllreduce.displacement` and `adamw_displacement`."""

_SOON = 32  # entries likewise
_TILE = 1 << 15  # elements whose flags stay in the second-level cache
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


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
    gradient: NDArray[np.float32] | ShardSum | Displacement,
    residual: NDArray[np.float32],
    all_added: bool = False,
) -> None:
    """Take the gradient back out of the residual, where `accumulate_select` put it in; exact to rounding.

    Args:
        all_added: every sum was finite. Else an element above half the largest float may stay in the residual: it could
            be one that was never added.
    """
    if not isinstance(gradient, Displacement):  # that stays
        _undo_accumulate(
            gradient.summed() if isinstance(gradient, ShardSum) else gradient, residual, all_added
        )


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


def clear_common(
    vector: NDArray[np.float32],
    entries: NDArray[np.void],
    others: NDArray[np.void],
    keep_values: bool = False,
) -> None:
    """Zero float32[n] at the indices that occur in both of two sorted lists, ENTRY[...] each.

    Args:
        keep_values: write the values of `entries` instead of zeros.
    """
    _set_common(vector, entries, others, keep_values, False)


def add_common(vector: NDArray[np.float32], entries: NDArray[np.void], others: NDArray[np.void]) -> None:
    """vector[index] += value, for the entries whose index is in `others`, too; lists as of `clear_common`."""
    _set_common(vector, entries, others, True, True)


@compiled((VECTOR, ENTRIES, ENTRIES, BOOL, BOOL))
def _set_common(vector, entries, others, keep_values, add):  # type: ignore[no-untyped-def]
    """At common indices the value of `entries` or zero, added or written."""
    # tile by tile through flags in the cache: a merge would wait for its last comparison at every entry
    flags = np.zeros(_TILE, np.uint8)
    common = np.empty(_TILE + 1, np.int64)  # positions in `entries`
    i = j = 0
    while i < len(entries) and j < len(others):
        start = min(entries[i].index, others[j].index)
        stop = np.int64(start) + _TILE
        first, matches = j, 0
        while j < len(others) and others[j].index < stop:
            flags[others[j].index - start] = 1
            j += 1
        while i < len(entries) and entries[i].index < stop:
            common[matches] = i
            matches += flags[entries[i].index - start]
            i += 1
        for at in range(matches):
            prefetch(vector, entries[common[min(at + _SOON, matches - 1)]].index)
            entry = entries[common[at]]
            value = entry.value if keep_values else np.float32(0)
            vector[entry.index] = vector[entry.index] + value if add else value
        for at in range(first, j):
            flags[others[at].index - start] = 0


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


@compiled((VECTOR, ENTRIES, FLOAT))
def add_entries(vector: NDArray[np.float32], entries: NDArray[np.void], scale: float) -> None:
    """vector[index] += value * scale, for every entry; product and sum are each rounded."""
    factor = np.float32(scale)
    for at in range(len(entries)):
        _prefetch_soon(vector, entries, at)
        vector[entries[at].index] += entries[at].value * factor


def write_block_scaled(block: NDArray[np.void], scale: float, out: NDArray[np.float32]) -> None:
    """out = values * scale, where ENTRY[ceil(m / 2)] holds float32[m] values, and out is float32[m]."""
    np.multiply(block.view(np.float32)[: len(out)], np.float32(scale), out=out)


@compiled((ENTRIES, INT, INT, INT))
def to_whole_indices(entries: NDArray[np.void], block: int, shards: int, shard: int) -> None:
    """Turn the indices of ENTRY[nnz] in a shard into those of the same elements in the whole vector, in place."""
    for at in range(len(entries)):
        index = np.int64(entries[at].index)
        entries[at].index = index + index // block * block * (shards - 1) + shard * block


@compiled((VECTOR, ENTRIES, ENTRIES))
def take_values(vector: NDArray[np.float32], support: NDArray[np.void], out: NDArray[np.void]) -> None:
    """Pack the elements of float32[n] at the indices of a list.

    Args:
        support: ENTRY[u], whose indices count.
        out: ENTRY[u], apart from `support`.
    """
    for at in range(len(support)):
        _prefetch_soon(vector, support, at)
        index = support[at].index
        out[at].index = index
        out[at].value = vector[index]
