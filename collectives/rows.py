"""Sparse sums of whole rows: of a table of which every rank has touched a few rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv, even_order, needs_balancing
from collectives.errors import FlaggedRanksError
from collectives.sparse import Array
from collectives.table_rows import Rows
from collectives.transport import Round, Transport

if TYPE_CHECKING:
    from collectives.cpu.rows import HostRowKernels
    from collectives.row_windows import DeviceRowWindows

_EVEN_ABOVE = 1.1
"""Gather in `even_order` where the largest block of sums exceeds this times the mean: it takes more messages."""

_POINTS = 16
"""Rows of its own that a rank shows the others, to cut the table by."""


def row_sparse_allreduce(
    local: Rows,
    length: int,
    transport: Transport,
    kernels: HostRowKernels,
    *,
    scale: float = 1.0,
    flag: bool = False,
    windows: DeviceRowWindows | None = None,
) -> Rows:
    """Sum rows over the ranks. Collective: every rank must call.

    The table is cut into a region a rank, balanced by the rows that the ranks touched, see `balanced_boundaries`. Every rank
    sends each region's rows to its owner, in rotated order. The owner adds them up in the order of ranks, in float32, so that the
    bits depend on the rows alone. An allgather brings the sums to all. With windows the owner reads the others' rows while it
    adds them up, and all read the owners' sums; the bits are the same.

    Every rank sums all rows of all ranks instead where this takes no more bytes: for 2 ranks, and with windows where
    P·u >= (P-1)·R in the last step that had rows, with R rows of all ranks and u in the sum. The bits are the same.

    Args:
        local: this rank's rows, as `coalesce` returns them; perhaps none.
        length: rows of the table, equal on all ranks.
        transport: where the ranks meet, and where the rows lie.
        kernels: of where the rows lie.
        scale: that each sum is multiplied by before it is rounded.
        flag: raise FlaggedRanksError on all ranks; it travels with the counts.
        windows: that all ranks read; None: rows travel as messages.

    Returns:
        The sums of all rows that a rank touched, equal on all ranks.

    Raises:
        FlaggedRanksError: on every rank alike: those that raised their flag, before a row was sent; none where a sum is not
            finite.

    Memory: the rows that arrive for this rank's region, its sums, and the sums of all; with windows not the first, but those of
        `DeviceRowWindows`. Besides what the kernels sort and add up by, on a GPU some 13 bytes a row: where all read all, of all
        ranks.
    Traffic: for 2 ranks all rows of its own, in 2 messages. For more, with r rows of its own, u in the sum, w bytes a row with
        its id, and regions that balance: (P-1)/P·r·w bytes in 2(P-1) messages, then (P-1)/P·u·w in 2·ceil(log2 P) rounds;
        where all read all, (P-1)·r·w in 2(P-1) messages.
        Where hot rows lie together, as by Zipf's law, the busiest rank sends at most 1.3 times that (counted for 2 to 64 ranks).
        Control: one alltoall of 2 int64; by owner an allgather of 17 before it, and one of 3 at the end.
        With windows bytes are counted where they are read from, by owner as many on average; 4 int64 in the alltoall, and what it
        takes to open larger windows now and then.
    Source: Li & Hoefler, PPoPP 2022, sections 3.1.1 and 3.1.2, with rows for entries.
    """
    size = transport.size
    # 2 ranks send r rows each where all sum all, which are fewer than (r + u)/2
    by_owner = size > 2 and not (windows is not None and windows.all_read_all)
    parts = [slice(0, len(local))] * size
    if by_owner:
        points = transport.allgather_control(_points(local.rows, transport, kernels))
        offsets = kernels.offsets(local.rows, balanced_boundaries(points, length)).tolist()
        parts = [slice(*ends) for ends in pairwise(offsets)]
    outgoing = np.array([[part.stop - part.start, flag, part.start, len(local)] for part in parts], np.int64)
    if windows is not None:
        windows.publish(local)
    incoming = transport.alltoall_control(outgoing if windows is not None else outgoing[:, :2].copy())
    if incoming[:, 1].any():
        raise FlaggedRanksError(np.flatnonzero(incoming[:, 1]).tolist())

    counts = incoming[:, 0]
    reads = windows is not None and windows.reserve(int(incoming[:, 3].max()), local)
    if windows is not None and reads:
        _count_reads(transport, outgoing[:, 0], local)
        sums, nonfinite = windows.sum_lists(incoming[:, 2], counts, local, scale)
    else:
        sums, nonfinite = _sum_messages(local, parts, counts, transport, kernels, scale)
    if by_owner:
        return _gather_sums(sums, nonfinite, len(local), transport, kernels, windows)
    if nonfinite:  # on every rank, which have summed the same
        raise FlaggedRanksError([])
    if windows is not None:
        _choose_readers(windows, reads, int(counts.sum()), len(sums), size)
    return sums


def _choose_readers(windows: DeviceRowWindows, reads: bool, received: int, summed: int, size: int) -> None:
    """Let all read all in the next step, if that would have taken no more bytes in this one, which was read in windows."""
    if received:
        windows.all_read_all = reads and size * summed >= (size - 1) * received


def _gather_sums(
    sums: Rows,
    nonfinite: int,
    own: int,
    transport: Transport,
    kernels: HostRowKernels,
    windows: DeviceRowWindows | None,
) -> Rows:
    """The sums of all owners, each rank of which gave `own` rows. Collective.

    Raises:
        FlaggedRanksError: a sum is not finite; on every rank alike.
    """
    if windows is not None:
        windows.publish(sums)
    gathered = transport.allgather_control(np.array([len(sums), nonfinite, own], np.int64))
    if gathered[:, 1].any():
        raise FlaggedRanksError([])
    counts = gathered[:, 0].copy()
    reads = windows is not None and windows.reserve(int(counts.max()), sums)
    if windows is not None:
        _choose_readers(windows, reads, int(gathered[:, 2].sum()), int(counts.sum()), transport.size)
        if reads:
            _count_reads(transport, np.full(transport.size, len(sums)), sums)
            return windows.gather(counts, sums)
    return _gather_messages(sums, counts, transport, kernels)


def _count_reads(transport: Transport, counts: NDArray[np.int64], rows: Rows) -> None:
    """Count what the other ranks read: so many of these rows each."""
    row_bytes = rows.rows.itemsize + rows.values.shape[1] * rows.values.itemsize
    others = [count for rank, count in enumerate(counts.tolist()) if rank != transport.rank and count]
    transport.traffic.count(sum(others) * row_bytes, 2 * len(others))


def _sum_messages(
    local: Rows,
    parts: list[slice],
    counts: NDArray[np.int64],
    transport: Transport,
    kernels: HostRowKernels,
    scale: float,
) -> tuple[Rows, int]:
    """Exchange parts[r] of the rows for counts[r] of each rank r, and add up what arrived, in the order of ranks. Collective."""
    rank, size = transport.rank, transport.size
    stops = counts.cumsum()
    lists = [slice(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True)]
    pool = Rows(kernels.empty(int(stops[-1]), local.rows), kernels.empty(int(stops[-1]), local.values))
    rounds: list[Round] = []
    for i in range(1, size):
        dest, source = (rank + i) % size, (rank - i) % size
        part, place = parts[dest], lists[source]
        rounds.append(Round(dest, local.rows[part], source, pool.rows[place]))
        rounds.append(Round(dest, _flat(local.values[part]), source, _flat(pool.values[place])))
    arrivals = transport.exchange(rounds, max(1, len(rounds)))
    kernels.copy(pool.rows[lists[rank]], local.rows[parts[rank]])
    kernels.copy(pool.values[lists[rank]], local.values[parts[rank]])
    for _ in arrivals:
        pass
    return kernels.merge(pool.rows, pool.values, stops - counts, scale)


def _gather_messages(
    sums: Rows, counts: NDArray[np.int64], transport: Transport, kernels: HostRowKernels
) -> Rows:
    """Everyone's sums, counts[r] of each rank r. Collective."""
    rank, width = transport.rank, sums.values.shape[1]
    total = int(counts.sum())
    every = Rows(kernels.empty(total, sums.rows), kernels.empty(total, sums.values))
    # rows that many ranks touched lie together, so that blocks of neighbours are small or large together
    order = even_order(counts) if needs_balancing(counts, _EVEN_ABOVE) else None
    first = int(counts[:rank].sum())
    block = slice(first, first + len(sums))
    kernels.copy(every.rows[block], sums.rows)
    kernels.copy(every.values[block], sums.values)
    allgatherv(every.rows, counts, transport, order=order)
    allgatherv(_flat(every.values), counts * width, transport, order=order)
    return every


def _points(rows: Array, transport: Transport, kernels: HostRowKernels) -> NDArray[np.int64]:
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
        points: int64[P, 1 + m], of each rank how many rows it has, and m of them, each for as many.
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


def _flat(values: Array) -> Array:
    """[m, width] as [m * width]."""
    return values.reshape(-1)
