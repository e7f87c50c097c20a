"""Balance and allgatherv: deliver every region's kept sums to all ranks, evened out first where they are skewed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv
from collectives.mpi import Transport
from collectives.sparse import SparseVector


def needs_balancing(counts: NDArray[np.int64], trigger: float) -> bool:
    """Whether the largest of int64[P] counts exceeds `trigger` times their mean; never for trigger >= P.

    Nor for two ranks: what one moves to the other it would send it anyway.
    """
    return len(counts) > 2 and int(counts.max()) * len(counts) > trigger * int(counts.sum())


def balance_and_allgatherv(
    kept: NDArray[np.void],
    counts: NDArray[np.int64],
    length: int,
    transport: Transport,
    trigger: float = 4.0,
) -> SparseVector:
    """Gather the ranks' blocks, in rank order, on all ranks.

    Where one block is much longer than the mean, entries move point to point first, so that every rank holds an equal
    share of the whole, in the same order; an allgatherv is as slow as its longest block.

    Args:
        kept: ENTRY[counts[r]], this rank's block, ascending; blocks of later ranks hold higher indices.
        counts: int64[P], entries of each block, equal on all ranks. Collective: every rank must call.
        length: elements of the dense vector.
        trigger: balance when the largest block exceeds this times the mean block.

    Returns:
        All blocks as one vector; its entries lie in the transport's workspace until the next call.

    Traffic: 2·(sum(counts) - own share) words received, ceil(log2 P) rounds; balancing adds at most 2·sum(counts)·(P-1)/P²
        words a rank on average, and at most P-1 messages.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.2.
    """
    total = int(counts.sum())
    gathered = transport.workspace.entries("gathered", total)
    ends = np.cumsum(counts)
    if needs_balancing(counts, trigger):
        cuts = total * np.arange(transport.size + 1, dtype=np.int64) // transport.size
        shares = np.diff(cuts)
        _redistribute(kept, ends - counts, ends, cuts, gathered, transport)
        allgatherv(gathered, shares, transport)
    else:
        allgatherv(gathered, counts, transport, own=kept)
    return SparseVector(gathered, length)


def _redistribute(
    kept: NDArray[np.void],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    cuts: NDArray[np.int64],
    gathered: NDArray[np.void],
    transport: Transport,
) -> None:
    """Move entries so that rank r holds gathered[cuts[r]:cuts[r + 1]] of the whole, which it held as begins[r]:ends[r]."""
    rank, size = transport.rank, transport.size

    def overlap(holder: int, target: int) -> tuple[int, int]:
        start = max(int(begins[holder]), int(cuts[target]))
        return start, max(start, min(int(ends[holder]), int(cuts[target + 1])))

    requests = []
    for i in range(1, size):
        source, dest = (rank - i) % size, (rank + i) % size
        start, stop = overlap(source, rank)
        requests += transport.receive(gathered[start:stop], source)
        start, stop = overlap(rank, dest)
        requests += transport.send(kept[start - begins[rank] : stop - begins[rank]], dest)
    start, stop = overlap(rank, rank)
    gathered[start:stop] = kept[start - begins[rank] : stop - begins[rank]]
    transport.wait(requests)
