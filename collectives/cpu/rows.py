"""Rows on the host: sort them by their id, and add up equal ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from collectives.cpu.compiled import FLOAT, compiled
from collectives.element_types import NAMES, narrow, widen
from collectives.rows import Rows, check_rows, row_type

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
    """See `collectives.rows.RowKernels`; arrays of NumPy."""

    arrays: Any = np

    def coalesce(self, rows: Any, values: Any, length: int, scale: float) -> tuple[Rows, int]:
        if len(rows):
            check_rows(rows, length)
        return _add_up(rows.astype(row_type(length), copy=False), values, scale)

    def merge(self, rows: Any, values: Any, firsts: NDArray[np.int64], scale: float) -> tuple[Rows, int]:
        return _add_up(rows, values, scale)  # sorts what lies in order in linear time

    def at(self, rows: Any, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows[places].astype(np.int64)

    def offsets(self, rows: Any, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(rows, boundaries).astype(np.int64)

    def empty(self, count: int, like: Any) -> Any:
        return np.empty((count, *like.shape[1:]), like.dtype)

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source


def _add_up(rows: Any, values: Any, scale: float) -> tuple[Rows, int]:
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
        taken = order[starts[first] : starts[last]]
        wide = widen(values[taken], kind)
        summed = np.empty((last - first, width), np.float32)
        within = starts[first : last + 1] - starts[first]
        sum_rows(wide, np.arange(len(taken)), within, scale, summed)
        sums[first:last] = narrow(summed, kind)
        nonfinite += int((~np.isfinite(widen(sums[first:last], kind))).sum())
        first = last
    return nonfinite
