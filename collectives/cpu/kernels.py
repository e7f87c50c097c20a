"""Host kernels on sorted COO lists: sum, count, filter.

Magnitudes are compared by bits: for finite floats the integer order of `bits & 0x7fffffff` is the order of |x|, a
denormal is compared as any other number, and a threshold of at least 1 bit never keeps a zero of either sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from collectives.cpu.codec import (  # noqa: F401 - kernels of a transport, too
    ASYNCHRONOUS,
    codec_report,
    cut_values,
    decode_entries,
    decode_values,
    encode_entries,
    encode_values,
    wait,
)
from collectives.cpu.compiled import ENTRIES, FLOAT, INT, NONE, VECTOR, compiled
from collectives.cpu.lanes import LANES, count, lowest

TILE = 4096
"""Elements of a region summed at a time: 16 KB of sums stay in the first-level cache."""

CANDIDATE_REACH = 1 << 21
"""How far candidate thresholds lie from the expected one at most, in bits of a magnitude: a quarter of an octave."""

CANDIDATE_STEP = 1 << 9
"""Candidates lie a multiple of this many bits from the expected threshold."""

_INTS = types.int64[::1]
_CANDIDATE_SHIFT = 9
_NO_HISTOGRAM = np.empty(0, np.int32)
_INFINITY = 0x7F800000
_FEW = 4  # sums of LANES that have an entry, as a rule
_MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled((FLOAT,), (types.float32,))
def magnitude_bits(value: float) -> int:
    """Bits of |value| as float32, an integer in [0, 2**31)."""
    return int(np.float32(value).view(np.int32) & _MAGNITUDE)


@compiled((INT,))
def bits_magnitude(bits: int) -> float:
    """The float32 magnitude with these bits."""
    return float(np.int32(bits).view(np.float32))


def sum_sorted_lists(
    pool: NDArray[np.void],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    lower: int,
    upper: int,
    threshold_bits: int,
    out: NDArray[np.void],
) -> tuple[int, int]:
    """Sum sorted COO lists over [lower, upper), and keep the sums whose magnitude reaches a threshold.

    The region is walked in tiles of TILE sums, so that no buffer as long as a region exists; each entry is read once.
    Every sum is taken in list order, from left to right, so that it depends on the lists alone.

    Args:
        pool: ENTRY[...]; list j is pool[begins[j]:ends[j]], its indices ascend strictly within [lower, upper).
        begins, ends: int64[lists].
        threshold_bits: bits of the smallest magnitude to keep, >= 1: a sum of zero is never kept.
        out: ENTRY[m], m > the sums kept or m >= min(entries in the lists, upper - lower); may lie in the pool, apart from
            the lists.

    Returns:
        (nnz, nonfinite): entries written to `out`, in ascending index order, and how many sums are Inf or NaN.
    """
    nnz, nonfinite = _sum(pool, begins, ends, lower, upper, threshold_bits, out, 0, _NO_HISTOGRAM)
    return int(nnz), int(nonfinite)


@compiled((ENTRIES, _INTS, _INTS, INT, INT, INT, ENTRIES, INT, types.int32[::1]))
def _sum(pool, begins, ends, lower, upper, threshold_bits, out, centre, histogram):  # type: ignore[no-untyped-def]
    threshold, lists = np.int32(threshold_bits), len(begins)
    cursor = begins.copy()
    sums = np.zeros(TILE, np.float32)
    bits = sums.view(np.int32)
    marks = np.zeros(TILE // LANES, np.uint64)  # which sums have an entry
    marked = np.empty(TILE + _FEW, np.int32)
    written = nonfinite = 0
    start = lower
    while start < upper:
        # skip tiles that no list reaches: a region may be long and empty
        nearest = upper
        for j in range(lists):
            if cursor[j] < ends[j]:
                nearest = min(nearest, np.int64(pool[cursor[j]].index))
        if nearest >= upper:
            break
        start = nearest
        stop = min(start + TILE, upper)
        for j in range(lists):
            at, end = cursor[j], ends[j]
            while at < end and pool[at].index < stop:
                i = (pool[at].index - start) & (TILE - 1)  # masks spare the code for negative indices
                sums[i] += pool[at].value
                marks[i // LANES] |= np.uint64(1) << np.uint64(i % LANES)
                at += 1
            cursor[j] = at
        tile_hits = 0
        for word in range(TILE // LANES):
            mask, marks[word] = marks[word], 0
            first, hits = word * LANES, count(mask)
            # without a branch, which nobody could predict; the next sums overwrite what is beyond `hits`
            for j in range(_FEW):
                marked[tile_hits + j] = first + lowest(mask)
                mask &= mask - np.uint64(1)
            for j in range(_FEW, hits):
                marked[tile_hits + j] = first + lowest(mask)
                mask &= mask - np.uint64(1)
            tile_hits += hits
        for j in range(tile_hits):
            i = marked[j] & (TILE - 1)
            magnitude = bits[i] & _MAGNITUDE
            out[written].index = start + i
            out[written].value = sums[i]
            sums[i] = 0
            written += magnitude >= threshold
            nonfinite += magnitude >= _INFINITY
        start = stop
    if len(histogram):
        for at in range(written):
            bits_above = magnitude_bits(out[at].value) - centre + CANDIDATE_REACH
            histogram[min(bits_above >> _CANDIDATE_SHIFT, len(histogram) - 1)] += 1
    return written, nonfinite


@compiled((ENTRIES, types.int32[::1]))
def count_at_least(entries: NDArray[np.void], thresholds: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count the entries that reach each of a few magnitudes, in a pass for each.

    Args:
        entries: ENTRY[nnz].
        thresholds: int32[m], ascending bits of magnitudes.

    Returns:
        int64[m], descending: entries with magnitude bits >= thresholds[j].
    """
    counts = np.zeros(len(thresholds), np.int64)
    for j in range(len(thresholds)):
        for at in range(len(entries)):
            counts[j] += magnitude_bits(entries[at].value) >= thresholds[j]
    return counts


def take_at_least(entries: NDArray[np.void], threshold_bits: int, ties: int, out: NDArray[np.void]) -> int:
    """Copy the entries whose magnitude reaches a threshold, in order.

    Args:
        entries: ENTRY[nnz].
        threshold_bits: bits of the smallest magnitude to copy.
        ties: how many entries of exactly that magnitude to copy; the first ones win.
        out: ENTRY[m], m >= the entries copied; may be `entries` itself.

    Returns:
        Entries copied.
    """
    return split_at_least(entries, threshold_bits, ties, out, None)[0]


def region_offsets(entries: NDArray[np.void], boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each region begins in a sorted list.

    Args:
        entries: ENTRY[nnz], ascending indices.
        boundaries: int64[P + 1], ascending.

    Returns:
        int64[P + 1]; region r is entries[offsets[r]:offsets[r + 1]].
    """
    return np.searchsorted(entries["index"], boundaries).astype(np.int64, copy=False)


def equal_count_splits(entries: NDArray[np.void], length: int, parts: int) -> NDArray[np.int64]:
    """The indices that split a sorted list into parts of equal count.

    Args:
        entries: ENTRY[nnz].
        length: elements of the dense vector.
        parts: >= 1.

    Returns:
        int64[parts - 1], ascending indices; those of equal lengths when the list is empty.
    """
    numbers = np.arange(1, parts, dtype=np.int64)
    if len(entries) == 0:
        return length * numbers // parts
    return entries["index"][len(entries) * numbers // parts].astype(np.int64)


@dataclass(frozen=True)
class CountedSums:
    """A region's sums, counted at candidate thresholds before one of these is chosen.

    Attributes:
        counts: int64[m + 1], the sums that reach each candidate, descending, Inf and NaN among them; then how many are
            Inf or NaN.
        take: (bits, count) -> ENTRY[count], the sums that reach the candidate with these bits; `count` is the candidate's of
            `counts`, so that no device is waited for. Called once, before other lists are summed.
    """

    counts: NDArray[np.int64]
    take: Callable[[int, int], Any]


def counted_sums(
    pool: NDArray[np.void],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    lower: int,
    upper: int,
    expected_bits: int,
    offsets: NDArray[np.int64],
    out: NDArray[np.void],
) -> CountedSums:
    """Sum sorted COO lists over [lower, upper), as `sum_sorted_lists`, and count the sums at candidate thresholds.

    Args:
        expected_bits: bits of the most likely threshold.
        offsets: int64[m], ascending multiples of CANDIDATE_STEP within +-CANDIDATE_REACH; the candidates are
            expected_bits + offsets, and those below 1 keep every sum that is not zero.
    """
    histogram = np.zeros(2 * CANDIDATE_REACH // CANDIDATE_STEP + 1, np.int32)
    lowest = max(1, expected_bits + int(offsets[0]))
    nnz, nonfinite = _sum(pool, begins, ends, lower, upper, lowest, out, expected_bits, histogram)
    reached = histogram[::-1].cumsum(dtype=np.int64)[::-1]
    counts = np.append(reached[(offsets + CANDIDATE_REACH) // CANDIDATE_STEP], nonfinite)
    sums = out[:nnz]

    def take(bits: int, count: int) -> NDArray[np.void]:
        take_at_least(sums, bits, nnz, sums)
        return sums[:count]

    return CountedSums(counts, take)


@compiled(
    (ENTRIES, INT, INT, ENTRIES, NONE),
    (ENTRIES, INT, INT, ENTRIES, ENTRIES),
)
def split_at_least(
    entries: NDArray[np.void],
    threshold_bits: int,
    ties: int,
    kept: NDArray[np.void],
    rest: NDArray[np.void] | None,
) -> tuple[int, int]:
    """Split a list by magnitude, in order.

    Args:
        entries: ENTRY[nnz].
        threshold_bits: bits of the smallest magnitude to keep.
        ties: how many entries of exactly that magnitude to keep; the first ones win.
        kept: ENTRY[...], long enough; may be `entries`.
        rest: ENTRY[...], long enough, apart from `entries`, for the others; None drops them.

    Returns:
        Entries kept, and the others.
    """
    threshold = np.int32(threshold_bits)
    nnz = others = 0
    # 64 at a time, first which: a branch at every entry would be taken at random
    for start in range(0, len(entries), LANES):
        stop = min(start + LANES, len(entries))
        mask = every = np.uint64(0)
        for at in range(start, stop):
            bits = magnitude_bits(entries[at].value)
            tie = (bits == threshold) & (ties > 0)
            ties -= tie
            bit = np.uint64(1) << np.uint64(at - start)
            every |= bit
            mask |= bit * np.uint64((bits > threshold) | tie)
        if rest is not None:
            dropped = every & ~mask
            while dropped:
                rest[others] = entries[start + lowest(dropped)]
                others += 1
                dropped &= dropped - np.uint64(1)
        while mask:
            kept[nnz] = entries[start + lowest(mask)]
            nnz += 1
            mask &= mask - np.uint64(1)
    return nnz, len(entries) - nnz


def write_block(entries: NDArray[np.void], lower: int, block: NDArray[np.void]) -> None:
    """Write a region densely, two values in the place of an entry.

    Args:
        entries: ENTRY[nnz], indices in [lower, lower + 2 * len(block)).
        lower: index of the block's first element.
        block: ENTRY[m], filled with float32[2m]; zero where nothing is stored.
    """
    _write_block(entries, lower, block.view(np.float32))


@compiled((ENTRIES, INT, VECTOR))
def _write_block(entries, lower, values):  # type: ignore[no-untyped-def]
    values[:] = 0
    for entry in entries:
        values[entry.index - lower] = entry.value


def add_values(kept: NDArray[np.float32], incoming: NDArray[np.float32]) -> None:
    """kept += incoming, both float32[n]."""
    with np.errstate(over="ignore", invalid="ignore"):  # the method looks for what is not finite
        np.add(kept, incoming, out=kept)


@compiled((VECTOR, FLOAT))
def scale_values(values: NDArray[np.float32], scale: float) -> NDArray[np.uint32]:
    """values *= scale, float32[n].

    Returns:
        uint32[1], not 0 if a product is not finite. On a GPU it is valid once the stream was waited for, until the next call.
    """
    factor, nonfinite = np.float32(scale), 0
    for i in range(len(values)):
        values[i] *= factor
        nonfinite += not np.isfinite(values[i])
    return np.full(1, nonfinite > 0, np.uint32)
