"""Allgatherv of COO blocks for any number of ranks: plain, balanced first, or with dense blocks where they are shorter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import SparseVector
from collectives.transport import Transport


def allgatherv(
    gathered: NDArray[np.void],
    counts: NDArray[np.int64],
    transport: Transport,
    own: NDArray[np.void] | None = None,
) -> None:
    """Deliver every rank's block to all ranks.

    In round j a rank passes on all it holds, at distance 2^j: to rank ^ 2^j where P is a power of two, and to
    rank - 2^j (from rank + 2^j, modulo P; Bruck's form) otherwise, where the last round moves only what is missing.

    Args:
        gathered: ENTRY[sum(counts)], all blocks in rank order.
        counts: int64[P], entries of each rank's block, equal on all ranks. Collective.
        own: ENTRY[counts[r]], this rank's block; None: it is in `gathered` already.

    Traffic: 2·(sum(counts) - counts[r]) words received by rank r, ceil(log2 P) rounds; a range of blocks that wraps
        around the end takes two messages.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.2; Bruck et al., IEEE TPDS 1997.
    """
    rank, size = transport.rank, transport.size
    offsets = [0, *counts.cumsum().tolist()]

    def pieces(first: int, blocks: int) -> list[NDArray[np.void]]:
        first %= size
        last = first + blocks
        ranges = [(first, last)] if last <= size else [(first, size), (0, last - size)]
        return [gathered[offsets[a] : offsets[b]] for a, b in ranges]

    place = gathered[offsets[rank] : offsets[rank + 1]]
    if size == 1 and own is not None:
        place[:] = own
    power_of_two = size & (size - 1) == 0
    distance = 1
    while distance < size:
        if power_of_two:
            dest = source = rank ^ distance
            outgoing = pieces(rank & -distance, distance)
            incoming = pieces(source & -distance, distance)
        else:
            dest, source = (rank - distance) % size, (rank + distance) % size
            blocks = min(distance, size - distance)
            outgoing, incoming = pieces(rank, blocks), pieces(source, blocks)
        if distance == 1 and own is not None:
            outgoing = [own]
        requests = [request for piece in incoming for request in transport.receive(piece, source)]
        requests += [request for piece in outgoing for request in transport.send(piece, dest)]
        if distance == 1 and own is not None:
            place[:] = own  # while the first round is on the wire
        transport.wait(requests)
        distance *= 2


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


@dataclass(frozen=True)
class GatheredRegions:
    """Every region's sums, in one buffer.

    Attributes:
        entries: ENTRY[offsets[-1]]; region r lies in entries[offsets[r]:offsets[r + 1]], as COO, or as float32 values of the
            whole region, two to an entry.
        offsets: int64[P + 1].
        dense: bool[P], which regions are dense.
        boundaries: int64[P + 1]; region r is [boundaries[r], boundaries[r + 1]).
    """

    entries: NDArray[np.void]
    offsets: NDArray[np.int64]
    dense: NDArray[np.bool_]
    boundaries: NDArray[np.int64]

    def block(self, region: int) -> NDArray[np.void]:
        """ENTRY[...] of one region."""
        return self.entries[self.offsets[region] : self.offsets[region + 1]]


def allgather_regions(
    sums: NDArray[np.void], counts: NDArray[np.int64], boundaries: NDArray[np.int64], transport: Transport
) -> GatheredRegions:
    """Deliver every rank's region to all ranks.

    Args:
        sums: ENTRY[counts[r]], this rank's region, ascending.
        counts: int64[P], entries of each region, equal on all ranks. Collective: every rank must call.
        boundaries: int64[P + 1], equal on all ranks.

    Returns:
        The regions; they lie in the transport's workspace until the next call.

    Traffic: min(2·nnz, length) words of every other rank's region received (a dense one rounded up to an even count),
        ceil(log2 P) rounds.
    Source: Renggli et al., SparCML, SC 2019, section 5.3.
    """
    lengths = np.diff(boundaries)
    dense = 2 * counts > lengths
    units = np.where(dense, (lengths + 1) // 2, counts)
    offsets = np.zeros(transport.size + 1, np.int64)
    np.cumsum(units, out=offsets[1:])
    gathered = transport.workspace.entries("gathered", int(offsets[-1]))
    regions = GatheredRegions(gathered, offsets, dense, boundaries)
    if dense[transport.rank]:
        block = regions.block(transport.rank)
        transport.kernels.write_block(sums, int(boundaries[transport.rank]), block)
        allgatherv(gathered, units, transport)
    else:
        allgatherv(gathered, units, transport, own=sums)
    return regions
