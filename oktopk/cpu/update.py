"""The update on the host: one walk writes a step's entries, and zeros where those of the step before were."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from collectives.cpu.compiled import ENTRIES, FLOAT, INT, VECTOR, compiled
from collectives.cpu.lanes import LANES, LINE, fence, lowest, stream_line
from collectives.sparse import ENTRY

STREAMED = 1 << 22
"""Bytes from which writing whole lines past the cache is the faster way; a smaller vector stays in the cache until it is read."""

_SPAN = LANES * LINE  # elements whose lines are the bits of one word
_NOTHING = np.empty(0, ENTRY)


class SparseUpdate:
    """Writes lists of entries to a vector that is zero elsewhere, one list after the other.

    It keeps which cache lines of the vector may not be zero. Those and the lines of the new entries are put together in the
    cache and written whole, past it: a line that is written whole is not read before, which halves its traffic.

    Args:
        vector: float32[n], zero; its memory.

    Memory: n/128 bytes.
    """

    def __init__(self, vector: NDArray[np.float32]) -> None:
        self._vector = vector
        self._shift = (
            vector.ctypes.data // vector.itemsize % LINE
        )  # elements of the first line that lie before the vector
        self._lines = np.zeros(-(-(len(vector) + self._shift) // _SPAN), np.uint64)

    def replace(self, entries: NDArray[np.void] = _NOTHING, scale: float = 1.0) -> None:
        """vector[index] = value * scale for every entry; zero elsewhere.

        Where other writes made the vector something else, it must be all zero again before.

        Args:
            entries: ENTRY[nnz], ascending indices; with others values land elsewhere, but inside the vector.

        Memory traffic: 8 nnz bytes, and 64 for every line of these entries or of those before.
        """
        _replace(self._vector, self._shift, self._lines, entries, scale)


@compiled((VECTOR, INT, types.uint64[::1], ENTRIES, FLOAT))
def _replace(vector, shift, lines, entries, scale):  # type: ignore[no-untyped-def]
    factor, length, nnz = np.float32(scale), len(vector), len(entries)
    span = np.zeros(_SPAN, np.float32)
    end = 0
    for word in range(len(lines)):
        low = word * _SPAN - shift
        high = low + _SPAN
        inside = (
            low >= 0 and high <= length
        )  # put together in `span`; at the vector's ends written where it belongs
        old, mask = lines[word], np.uint64(0)
        while old and not inside:
            first = low + lowest(old) * LINE
            for at in range(max(first, 0), min(first + LINE, length)):
                vector[at] = 0
            old &= old - np.uint64(1)
        begin = end
        while end < nnz and entries[end].index < high:
            index, value = entries[end].index, entries[end].value * factor
            at = (index - low) & (_SPAN - 1)  # in the span even where a list is out of order
            if inside:
                span[at] = value
            else:
                vector[index] = value
            mask |= np.uint64(1) << np.uint64(at // LINE)
            end += 1
        lines[word] = mask
        if inside:
            written = mask | old
            while written:
                first = lowest(written) * LINE
                stream_line(vector, low + first, span, first)
                written &= written - np.uint64(1)
            for j in range(begin, end):
                span[(entries[j].index - low) & (_SPAN - 1)] = 0
    fence()
