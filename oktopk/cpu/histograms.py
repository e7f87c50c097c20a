"""Host kernels that count magnitudes by the digits of their bits."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from collectives.cpu.compiled import INT, VECTOR, compiled
from collectives.cpu.lanes import LANES, count, load, lowest, reaching

LEVELS = ((20, 11), (10, 10), (0, 10))
"""(shift, width) of the digits of a radix histogram over the 31 bits of a magnitude, coarsest first."""

INFINITE_DIGIT = 0x7F8
"""The first digit of Inf in a histogram of level 0; those of NaN are as high or higher, all others are lower."""

_SAMPLE = 1 << 14  # elements that a floor is guessed from
_FEWEST = 32  # of the sample that are to lie above it at least
_MAGNITUDE = np.int32(0x7FFFFFFF)


def magnitude_histogram(
    values: NDArray[np.float32] | NDArray[np.void], level: int, prefix: int
) -> NDArray[np.int64]:
    """Count nonzero magnitudes by one digit of their bits.

    Args:
        values: float32[n], or ENTRY[n] whose values are counted.
        level: which digit, an index into LEVELS.
        prefix: the digits above it that a magnitude must have to be counted; 0 at level 0.

    Returns:
        int64[2**width], counts by digit, ascending.
    """
    return _magnitude_histogram(words_of(values), *LEVELS[level], prefix)


def top_histogram(values: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """As `magnitude_histogram` of the first digit, exact from the top down to where k magnitudes are reached.

    The magnitudes below may be counted in a lower digit than theirs; the total is exact. So only as many are looked at closely
    as a sample says, and the rest is counted by vectors.

    Args:
        values: float32[n].
        k: >= 1.

    Returns:
        int64[2**11].
    """
    shift, width = LEVELS[0]
    sample = np.sort(values[:: max(1, len(values) // _SAMPLE)].view(np.int32) & _MAGNITUDE)
    rank = 2 * k * len(sample) // max(1, len(values)) + _FEWEST
    floor = int(sample[-rank]) >> shift << shift if rank <= len(sample) else 0
    if floor:
        counts = _top_histogram(values, floor, shift, width)
        if counts[floor >> shift :].sum() >= k:
            return counts
    return magnitude_histogram(values, 0, 0)


@compiled((VECTOR, INT, INT, INT))
def _top_histogram(values, floor, shift, width):  # type: ignore[no-untyped-def]
    counts = np.zeros(1 << width, np.int64)
    bits, lowest_bits = values.view(np.int32), np.int32(floor)
    rest = np.zeros(LANES, np.float32)  # what is left of the vector, padded with zeros
    below = 0
    for start in range(0, len(values), LANES):
        size = min(LANES, len(values) - start)
        if size < LANES:
            rest[:size] = values[start:]
        lanes = load(values, start) if size == LANES else load(rest, 0)
        mask = reaching(lanes, lowest_bits)
        below += count(reaching(lanes, np.int32(1))) - count(mask)
        while mask:
            counts[(bits[start + lowest(mask)] & _MAGNITUDE) >> shift] += 1
            mask &= mask - np.uint64(1)
    counts[0] += below
    return counts


def words_of(values: NDArray[np.float32] | NDArray[np.void]) -> NDArray[np.int32]:
    """int32[n], the bits of float32[n], or of the values of ENTRY[n]; shares their memory."""
    words = values.view(np.int32)
    return words if values.dtype.fields is None else words[1::2]


@compiled((types.int32[::1], INT, INT, INT), (types.int32[:], INT, INT, INT))
def _magnitude_histogram(words, shift, width, prefix):  # type: ignore[no-untyped-def]
    counts = np.zeros(1 << width, np.int64)
    mask = (1 << width) - 1
    for at in range(len(words)):
        bits = words[at] & _MAGNITUDE
        if bits != 0 and (bits >> (shift + width)) == prefix:
            counts[(bits >> shift) & mask] += 1
    return counts
