"""Sparse sums of whole rows: of a table of which every rank has touched a few rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv, even_order, needs_balancing
from collectives.sparse import MAX_LENGTH
from collectives.transport import FlaggedRanksError, Round, Transport

ELEMENT_TYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""Type of a table's elements -> how NumPy holds them; bfloat16 by its bits."""

_EVEN_ABOVE = 1.1
"""Gather in `even_order` where the largest block of sums exceeds this times the mean: it takes more messages."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        rows: int32[m] or int64[m], where a table is longer than 2**31 - 1 rows; ascending strictly.
        values: [m, width] of the table's type; row j is that of rows[j].
    """

    rows: Any
    values: Any

    def __len__(self) -> int:
        return len(self.rows)


class RowKernels(Protocol):
    """What is done to rows where they lie: by `collectives.cpu.rows` on the host, on a GPU by `collectives.cuda.rows`.

    Attributes:
        arrays: the module of these arrays, NumPy or CuPy.
    """

    arrays: Any

    def coalesce(self, rows: Any, values: Any, scale: float) -> tuple[Rows, int]:
        """Sort rows by their number, and add up equal ones, in the order in which they are given, in float32.

        Args:
            rows: int32[m] or int64[m], in any order, more than once each perhaps.
            values: [m, width].
            scale: that each sum is multiplied by before it is rounded to the type of the values.

        Returns:
            The sums, and how many of their elements are Inf or NaN.
        """

    def at(self, rows: Any, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64, on the host: the rows at these places."""

    def offsets(self, rows: Any, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of ascending rows are below each boundary."""

    def empty(self, count: int, like: Any) -> Any:
        """[count] or [count, width] of the type of `like`, contents undefined."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array to another of the same shape; on a GPU before anything that a transport sends after it."""


_POINTS = 16
"""Rows of its own that a rank shows the others, to cut the table by."""


def widen(values: Any, element_type: str) -> Any:
    """Elements of a type as float32; those of float32 as they are."""
    if element_type == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrow(values: Any, element_type: str) -> Any:
    """float32 rounded to a type, to nearest even; a NaN stays one."""
    if element_type == "bfloat16":
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        rounded[np.isnan(values)] = 0x7FC0
        return rounded
    with np.errstate(over="ignore"):
        return values.astype(ELEMENT_TYPES[element_type], copy=False)


def row_type(length: int) -> Any:
    """Of the numbers of rows of a table of so many."""
    return np.int32 if length <= MAX_LENGTH else np.int64


def row_sparse_allreduce(
    own: Rows,
    length: int,
    transport: Transport,
    kernels: RowKernels,
    *,
    scale: float = 1.0,
    flag: bool = False,
) -> Rows:
    """Sum rows over the ranks. Collective: every rank must call.

    The table is cut into a region a rank, balanced by the rows that the ranks touched, see `balanced_boundaries`. Every rank
    sends each region's rows to its owner, in rotated order. The owner adds them up in the order of ranks, in float32, so that the
    bits depend on the rows alone. An allgather brings the sums to all. All of it is messages, also where ranks share a host.

    Args:
        own: this rank's rows, as `coalesce` returns them; perhaps none.
        length: rows of the table, equal on all ranks.
        transport: where the ranks meet, and where the rows lie.
        kernels: of where the rows lie.
        scale: that each sum is multiplied by before it is rounded.
        flag: raise FlaggedRanksError on all ranks; it travels with the counts.

    Returns:
        The sums of all rows that a rank touched, equal on all ranks.

    Raises:
        FlaggedRanksError: on every rank alike: those that raised their flag, before a row was sent; none where a sum is not
            finite.

    Memory: the rows that arrive for this rank's region, its sums, and the sums of all.
    Traffic: for 2 ranks all rows of its own, in 2 messages. For more, with r rows of its own, u in the sum, w bytes a row with
        its number, and regions that balance: (P-1)/P·r·w bytes in 2(P-1) messages, then (P-1)/P·u·w in 2·ceil(log2 P) rounds.
        Where hot rows lie together, as by Zipf's law, the busiest rank sends at most 1.3 times that (counted for 2 to 64 ranks).
        Control: one alltoall of 2 int64; for more than 2 ranks an allgather of 17 before it, and one of 2 at the end.
    Source: Li & Hoefler, PPoPP 2022, sections 3.1.1 and 3.1.2, with rows for entries.
    """
    rank, size = transport.rank, transport.size
    width = own.values.shape[1]
    if size == 2:  # both ranks sum all rows: r of them are sent, which are fewer than (r + u)/2
        parts = [slice(0, len(own))] * 2
    else:
        points = transport.allgather_control(_points(own.rows, transport, kernels))
        at = kernels.offsets(own.rows, balanced_boundaries(points, length)).tolist()
        parts = [slice(*ends) for ends in pairwise(at)]
    outgoing = np.array([[part.stop - part.start, flag] for part in parts], np.int64)
    incoming = transport.alltoall_control(outgoing)
    if incoming[:, 1].any():
        raise FlaggedRanksError(np.flatnonzero(incoming[:, 1]).tolist())

    # the lists of all ranks in their order, which is that of the sums
    stops = incoming[:, 0].cumsum()
    lists = [slice(int(stop - count), int(stop)) for stop, count in zip(stops, incoming[:, 0], strict=True)]
    pool = Rows(kernels.empty(int(stops[-1]), own.rows), kernels.empty(int(stops[-1]), own.values))
    rounds: list[Round] = []
    for i in range(1, size):
        dest, source = (rank + i) % size, (rank - i) % size
        part, place = parts[dest], lists[source]
        rounds.append(Round(dest, own.rows[part], source, pool.rows[place]))
        rounds.append(Round(dest, _flat(own.values[part]), source, _flat(pool.values[place])))
    arrivals = transport.exchange(rounds, max(1, len(rounds)))
    kernels.copy(pool.rows[lists[rank]], own.rows[parts[rank]])
    kernels.copy(pool.values[lists[rank]], own.values[parts[rank]])
    for _ in arrivals:
        pass
    sums, nonfinite = kernels.coalesce(pool.rows, pool.values, scale)
    del pool
    if size <= 2:
        if nonfinite:  # on both ranks, which have summed the same
            raise FlaggedRanksError([])
        return sums

    gathered = transport.allgather_control(np.array([len(sums), nonfinite], np.int64))
    if gathered[:, 1].any():
        raise FlaggedRanksError([])
    counts = gathered[:, 0].copy()
    total = int(counts.sum())
    every = Rows(kernels.empty(total, own.rows), kernels.empty(total, own.values))
    # rows that many ranks touched lie together, so that blocks of neighbours are small or large together
    order = even_order(counts) if needs_balancing(counts, _EVEN_ABOVE) else None
    first = int(counts[:rank].sum())
    block = slice(first, first + len(sums))
    kernels.copy(every.rows[block], sums.rows)
    kernels.copy(every.values[block], sums.values)
    allgatherv(every.rows, counts, transport, order=order)
    allgatherv(_flat(every.values), counts * width, transport, order=order)
    return every


def _points(rows: Any, transport: Transport, kernels: RowKernels) -> NDArray[np.int64]:
    """int64[1 + _POINTS]: how many ascending rows there are, and some of them, evenly spaced, at other places on each rank."""
    points = np.zeros(1 + _POINTS, np.int64)
    points[0] = len(rows)
    if len(rows):
        size = transport.size
        places = (np.arange(_POINTS) * size + transport.rank) * len(rows) // (_POINTS * size)
        points[1:] = kernels.at(rows, places)
    return points


def balanced_boundaries(points: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Cut a table into one contiguous region per rank, of about equally many rows of all ranks together.

    Args:
        points: int64[P, 1 + m], of each rank the number of its rows, and m of them, each for as many.
        length: rows of the table.

    Returns:
        int64[P + 1], ascending; rank r owns [boundaries[r], boundaries[r + 1]).
    """
    size = len(points)
    rows = points[:, 1:].ravel()
    weights = np.repeat(points[:, 0], points.shape[1] - 1)
    order = np.argsort(rows, kind="stable")
    weights = weights[order]
    below = weights.cumsum() - weights
    total = int(weights.sum())
    boundaries = length * np.arange(size + 1, dtype=np.int64) // size
    if total:
        cuts = np.searchsorted(below, total * np.arange(1, size) // size)
        boundaries[1:-1] = np.append(rows[order], length)[cuts]
    return boundaries


def _flat(values: Any) -> Any:
    """[m, width] as [m * width]."""
    return values.reshape(-1)
