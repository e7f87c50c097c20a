"""Rows on the host: sort them by their id, and add up equal ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from collectives.cpu.compiled import FLOAT, compiled
from collectives.element_types import NAMES, narrow, widen
from collectives.sparse import Array
from collectives.table_rows import Rows, check_rows, row_type

_BLOCK = 1 << 18
"""Elements of half a word that are widened to float32 at a time: 1 MB."""

_VALUES = types.float32[:, ::1]
_INTS = types.int64[::1]


@compiled((_VALUES, _INTS, _INTS, FLOAT, _VALUES))
def sum_rows(
    values: NDArray[np.float32],
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    scale: float,
    sums: NDArray[np.float32],
) -> int:
    """Write the sum of the rows order[starts[j]:starts[j + 1]] to sums[j], from left to right, then scaled.

    Returns:
        How many elements of the sums are Inf or NaN.
    """
    width = values.shape[1]
    factor = np.float32(scale)
    nonfinite = 0
    for j in range(len(starts) - 1):
        first = order[starts[j]]
        for column in range(width):
            sums[j, column] = values[first, column]
        for i in range(starts[j] + 1, starts[j + 1]):
            row = order[i]
            for column in range(width):
                sums[j, column] += values[row, column]
        excess = np.float32(0.0)
        for column in range(width):
            sums[j, column] *= factor
            excess += sums[j, column] - sums[j, column]  # NaN of Inf and of NaN
        if excess != np.float32(0.0):
            for column in range(width):
                nonfinite += not np.isfinite(sums[j, column])
    return nonfinite


class HostRowKernels:
    """What is done to rows where they lie: here on the host. On a GPU `collectives.cuda.rows` overrides all of it.

    Attributes:
        arrays: the module of these arrays, NumPy or CuPy.
    """

    arrays: Any = np

    def coalesce(self, rows: Array, values: Array, length: int, scale: float) -> tuple[Rows, int]:
        """Sort rows by their id, and add up equal ones, in the order in which they are given, in float32.

        Args:
            rows: int32[m] or int64[m], in any order, more than once each perhaps.
            values: [m, width], C-contiguous.
            length: of the table; the ids of the sums are of its `row_type`.
            scale: that each sum is multiplied by before it is rounded to the type of the values.

        Returns:
            The sums, and how many of their elements are Inf or NaN.

        Raises:
            ValueError: a row is not in [0, length); on a GPU m > MOST_ON_GPU, or length > LONGEST_ON_GPU.
        """
        if len(rows):
            check_rows(rows, length)
        return _add_up(rows.astype(row_type(length), copy=False), values, scale)

    def merge(self, rows: Array, values: Array, firsts: NDArray[np.int64], scale: float) -> tuple[Rows, int]:
        """As `coalesce`, of lists one after the other, each of which ascends strictly, from firsts[0], firsts[1], ... on."""
        return _add_up(rows, values, scale)  # sorts what lies in order in linear time

    def at(self, rows: Array, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64, on the host: the rows at these places."""
        return rows[places].astype(np.int64)

    def offsets(self, rows: Array, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of ascending rows are below each boundary."""
        return np.searchsorted(rows, boundaries).astype(np.int64)

    def empty(self, count: int, like: Array) -> Array:
        """[count] or [count, width] of the type of `like`, contents undefined."""
        return np.empty((count, *like.shape[1:]), like.dtype)

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array to another of the same shape; on a GPU before anything that a transport sends after it."""
        target[...] = source


def _add_up(rows: Array, values: Array, scale: float) -> tuple[Rows, int]:
    """As `coalesce`, of rows that are in the table."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    starts = np.append(firsts, len(rows))
    sums = np.empty((len(firsts), values.shape[1]), values.dtype)
    if values.dtype == np.float32:
        nonfinite = sum_rows(values, order, starts, scale, sums)
    else:
        nonfinite = _sum_halves(values, order, starts, scale, sums)
    return Rows(ordered[firsts], sums), nonfinite


def _sum_halves(
    values: NDArray[Any],
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    scale: float,
    sums: NDArray[Any],
) -> int:
    """As `sum_rows`, for types of 16 bits: some rows at a time in float32, then rounded."""
    kind = NAMES[values.dtype]
    width, nonfinite, first = values.shape[1], 0, 0
    most = max(1, _BLOCK // max(1, width))
    while first < len(starts) - 1:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + most, side="right")) - 1)
        positions = order[starts[first] : starts[last]]
        wide = widen(values[positions], kind)
        summed = np.empty((last - first, width), np.float32)
        within = starts[first : last + 1] - starts[first]
        sum_rows(wide, np.arange(len(positions)), within, scale, summed)
        sums[first:last] = narrow(summed, kind)
        nonfinite += int((~np.isfinite(widen(sums[first:last], kind))).sum())
        first = last
    return nonfinite
