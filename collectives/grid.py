"""Split and reduce over a grid of ranks: along its rows, then down its columns, in some 2·sqrt(P) messages a rank.

A column is a run of consecutive ranks, so that its regions lie side by side, and has R rows. In the first stage a rank sends
what it selected in a column's regions to the rank of that column in its own row, which sums what arrives. In the second stage
the sums go to the ranks of the column that own the regions.

Where P is not R·C, some columns have one rank more, the last one. It owns a region and has no row of its own: in the first stage
it sends to the ranks of a row, the last rank of each such column to those of another row, and receives nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from collectives.codec import PLAIN, Codec
from collectives.errors import FlaggedRanksError
from collectives.sparse import SparseVector
from collectives.split_and_reduce import RegionLists, split_and_reduce
from collectives.transport import Transport


def rows_of_grid(ranks: int) -> int:
    """R, the rows of a grid of so many ranks: at most their square root; 1 for fewer than 4 ranks, which need no grid.

    It divides the number of ranks where that makes it smaller by less than half.
    """
    root = math.isqrt(ranks)
    exact = next(rows for rows in range(root, 0, -1) if ranks % rows == 0)
    return exact if 2 * exact > root else root


@dataclass(frozen=True)
class GridPlace:
    """Where a rank is in the grid.

    Attributes:
        column, row: from 0; of the last rank of a longer column the row that it sends to.
        members: ranks of the row, ascending, with the one that sends to it, if there is one.
        cuts: int64[len(members) + 1], indices into the P + 1 boundaries of regions: member i sums the regions
            [cuts[i], cuts[i + 1]) of its row, none where it only sends.
        first, stop: ranks of the column, which own its regions.
    """

    column: int
    row: int
    members: tuple[int, ...]
    cuts: NDArray[np.int64]
    first: int
    stop: int


def place_in_grid(rank: int, ranks: int) -> GridPlace:
    """The place of a rank among so many. Column c has R ranks, or R + 1 where c is below P modulo R·C."""
    rows = rows_of_grid(ranks)
    columns = ranks // rows
    longer = ranks - rows * columns  # fewer than the rows: each sends to a row of its own
    firsts = [rows * column + min(column, longer) for column in range(columns + 1)]
    column = next(c for c in range(columns) if firsts[c + 1] > rank)
    row = rank - firsts[column]
    if row == rows:
        row = column
    members, cuts = [], []
    for c in range(columns):
        members.append(firsts[c] + row)
        cuts.append(firsts[c])
        if c == row < longer:
            members.append(firsts[c] + rows)
            cuts.append(firsts[c + 1])
    every = np.array([*cuts, ranks], np.int64)
    return GridPlace(column, row, tuple(members), every, firsts[column], firsts[column + 1])


@dataclass(frozen=True)
class Grid:
    """A rank's place in the grid, and its connections there.

    Attributes:
        place: of this rank.
        row: among `place.members`.
        column: among the ranks of the column.
    """

    place: GridPlace
    row: Transport
    column: Transport

    def close(self) -> None:
        """Free what the library holds. Collective."""
        self.column.close()
        self.row.close()


def connect_grid(transport: Transport) -> Grid | None:
    """The grid of the ranks of a transport; None for fewer than 4. Collective: every rank must call.

    Traffic: two control allgathers of an object of each rank.
    """
    if rows_of_grid(transport.size) == 1:
        return None
    place = place_in_grid(transport.rank, transport.size)
    with ExitStack() as opened:  # closed where this raises
        row = transport.split(place.row)
        assert row is not None
        opened.callback(row.close)
        column = transport.split(place.column)
        assert column is not None
        opened.pop_all()
    return Grid(place, row, column)


def reduce_over_grid(
    packed: SparseVector,
    boundaries: NDArray[np.int64],
    transport: Transport,
    flag: bool = False,
    offsets: Sequence[int] | NDArray[np.int64] | None = None,
    bucket_rounds: int = 8,
    rotate: bool = True,
    codec: Codec = PLAIN,
    meanwhile: Callable[[], object] | None = None,
) -> RegionLists:
    """As `split_and_reduce`, over a grid. Collective: every rank must call.

    Sums run in rotation order along the row, from the own rank down, and these sums in rotation order down the column. So
    they depend on P and the boundaries alone.

    Args:
        packed, boundaries, flag, offsets, bucket_rounds, rotate, codec, meanwhile: as of `split_and_reduce`.
        transport: whose `grid` it is.

    Returns:
        The contributions to this rank's region, at most one list per rank of the column, and what it has `passed`.

    Raises:
        FlaggedRanksError: as of `split_and_reduce`.

    Traffic: at most C messages along the row and R down the column, R·C <= P; where regions balance 2k(P-R)/P words along rows
        and at most 2k(P-C)/P down columns, in the mean over the ranks. Control: one allgather of an int64; and one alltoall
        of 2 int64 per rank in the row, and one in the column.
    Source: own.
    """
    grid: Grid = transport.grid
    place = grid.place
    flagged = np.flatnonzero(transport.allgather_control(np.array([flag], np.int64)))
    if len(flagged):
        raise FlaggedRanksError(flagged.tolist())
    codec.start()
    try:
        along = split_and_reduce(
            packed,
            boundaries[place.cuts],
            grid.row,
            offsets=None if offsets is None else np.asarray(offsets)[place.cuts],
            bucket_rounds=bucket_rounds,
            rotate=rotate,
            codec=codec.among(place.members),
            meanwhile=meanwhile,
        )
        sums, nonfinite = along.checked_sums()
        if nonfinite:  # no codec takes them: all ranks hear of it with the sums of the regions
            sums = sums[:0]
        passed = SparseVector(sums, packed.length)
        lists = split_and_reduce(
            passed,
            boundaries[place.first : place.stop + 1],
            grid.column,
            bucket_rounds=bucket_rounds,
            rotate=rotate,
            codec=codec.among(range(place.first, place.stop)),
        )
    finally:
        for part in (grid.row, grid.column):
            transport.traffic += part.take_traffic()
    return replace(lists, transport=transport, codec=codec, overflowed=nonfinite > 0, passed=passed)
