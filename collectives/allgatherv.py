"""Allgatherv of blocks for any number of ranks: as they are, balanced first, or dense where that is shorter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.codec import PLAIN, Codec
from collectives.sparse import ENTRY, Entries, SparseVector, slices
from collectives.traffic import WORD_BYTES
from collectives.transport import Transport


def allgatherv(
    gathered: NDArray[Any],
    counts: NDArray[np.int64],
    transport: Transport,
    own: NDArray[Any] | None = None,
    order: list[int] | None = None,
) -> None:
    """Deliver every rank's block to all ranks.

    In round j a rank passes on all blocks that it has, at distance 2^j: to rank ^ 2^j where P is a power of two, and to
    rank - 2^j (from rank + 2^j, modulo P; Bruck's form) otherwise, where the last round moves only what is missing.

    Args:
        gathered: [sum(counts)] of entries or any other type, filled with all blocks in rank order.
        counts: int64[P], elements of each rank's block, equal on all ranks. Collective.
        own: [counts[r]], this rank's block; None: it is in `gathered` already.
        order: all ranks, in the order by which distances are counted; equal on all ranks. None: by their number.

    Traffic: all but the own block received, ceil(log2 P) rounds; a message for each run of blocks of neighbouring ranks, which
        without `order` are one or two a round.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.2; Bruck et al., IEEE TPDS 1997.
    """
    rank, size = transport.rank, transport.size
    offsets = [0, *counts.cumsum().tolist()]
    order = list(range(size)) if order is None else order
    place = order.index(rank)

    def blocks_from(first: int, blocks: int) -> list[NDArray[Any]]:
        ranks = sorted(order[(first + i) % size] for i in range(blocks))
        cuts = [0, *(i for i in range(1, blocks) if ranks[i] > ranks[i - 1] + 1), blocks]
        return [gathered[offsets[ranks[a]] : offsets[ranks[b - 1] + 1]] for a, b in pairwise(cuts)]

    own_block = gathered[offsets[rank] : offsets[rank + 1]]
    if size == 1 and own is not None:
        own_block[:] = own
    power_of_two = size & (size - 1) == 0
    distance = 1
    while distance < size:
        if power_of_two:
            dest = source = order[place ^ distance]
            outgoing = blocks_from(place & -distance, distance)
            incoming = blocks_from((place ^ distance) & -distance, distance)
        else:
            dest, source = order[(place - distance) % size], order[(place + distance) % size]
            blocks = min(distance, size - distance)
            outgoing, incoming = blocks_from(place, blocks), blocks_from(place + distance, blocks)
        if distance == 1 and own is not None:
            outgoing = [own]
        requests = [request for part in incoming for request in transport.receive(part, source)]
        requests += [request for part in outgoing for request in transport.send(part, dest)]
        if distance == 1 and own is not None:
            own_block[:] = own  # while the first round is on the wire
        transport.wait(requests)
        distance *= 2


def even_order(counts: NDArray[np.int64]) -> list[int]:
    """An `order` for `allgatherv` in which ranks pass on about equally much in every round but the first.

    The largest block is paired with the smallest, the second with the last but one, and so on; then the pairs alike, by their
    sums; and so on. An allgatherv in this order sends no more than in any other, and the busiest rank far less, where
    neighbours have blocks of like length.

    Args:
        counts: int64[P], elements of each rank's block.
    """
    groups = [([rank], count) for rank, count in enumerate(counts.tolist())]
    while len(groups) > 1:
        groups.sort(key=lambda group: -group[1])
        half = len(groups) // 2
        paired = zip(groups[:half], groups[: -half - 1 : -1], strict=True)
        groups = [(a + b, m + n) for (a, m), (b, n) in paired] + groups[half : len(groups) - half]
    return groups[0][0]


def needs_balancing(counts: NDArray[np.int64], trigger: float) -> bool:
    """Whether the largest of int64[P] counts exceeds `trigger` times their mean; never for trigger >= P.

    Never for two ranks either: what balancing would move, the allgatherv sends anyway.
    """
    return len(counts) > 2 and int(counts.max()) * len(counts) > trigger * int(counts.sum())


def balance_and_allgatherv(
    kept: Entries,
    counts: NDArray[np.int64],
    length: int,
    transport: Transport,
    trigger: float = 4.0,
    codec: Codec = PLAIN,
    boundaries: NDArray[np.int64] | None = None,
) -> SparseVector:
    """Gather the ranks' blocks, in rank order, on all ranks.

    Where one block is much longer than the mean, entries move point to point first, so that every rank holds an equal
    share of the whole, in the same order; an allgatherv is as slow as its longest block. They move as plain entries: each
    is encoded once, by the rank that holds it in the allgatherv.

    Args:
        kept: ENTRY[counts[r]], this rank's block, ascending; blocks of later ranks hold higher indices.
        counts: int64[P], entries of each block, equal on all ranks. Collective: every rank must call.
        length: elements of the dense vector.
        trigger: balance when the largest block exceeds this times the mean block.
        codec: encodes the gathered entries; equal on all ranks. With one that rounds, all ranks get the rounded values, and
            `kept` becomes their errors, the exact value less the rounded one.
        boundaries: int64[P + 1], block r lies in [boundaries[r], boundaries[r + 1]); None: in the whole vector.

    Returns:
        All blocks as one vector; its entries lie in the transport's workspace until the next call.

    Raises:
        ValueError: a block did not decode; on every rank alike, as all decode the same bytes. Where a device decodes, the codec
            knows it only once that was waited for.

    Traffic: the codec's bytes of all but the own share received, at most 2·(sum(counts) - share) words, ceil(log2 P) rounds;
        balancing adds at most 2·sum(counts)·(P-1)/P² words a rank on average, and at most P-1 messages.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.2.
    """
    size, rank = transport.size, transport.rank
    total, ends = int(counts.sum()), counts.cumsum()
    gathered = transport.workspace.entries("gathered", total)
    block, shares = kept, counts
    if needs_balancing(counts, trigger):
        splits = total * np.arange(size + 1, dtype=np.int64) // size
        block, shares = _redistribute(kept, counts, splits, gathered, transport), np.diff(splits)
    if codec is PLAIN:
        allgatherv(gathered, shares, transport, own=block)
        return SparseVector(gathered, length)
    ranges = [(0, length)] * size if boundaries is None else _ranges(ends, shares, boundaries)
    parts = zip(shares.tolist(), ranges, strict=True)
    sizes = [codec.wire_bytes(share, *within) // ENTRY.itemsize for share, within in parts]
    buffer = codec.buffer("gathered wires", gathered, sum(sizes))
    wires, blocks = slices(buffer, sizes), slices(gathered, shares.tolist())
    codec.encode(block, *ranges[rank], wires[rank], rank)
    allgatherv(buffer, np.array(sizes), transport)
    for source in range(size):
        codec.decode(wires[source], *ranges[source], blocks[source], source, gathered=True)
    if codec.rounds and block is not kept:
        codec.cut_errors(kept, gathered[int(ends[rank]) - len(kept) : int(ends[rank])])
    codec.check_gathered()
    return SparseVector(gathered, length)


def _ranges(
    ends: NDArray[np.int64], shares: NDArray[np.int64], boundaries: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Where the indices of each share are: from the region of its first entry to that of its last.

    This is known without an exchange. A share of a region that was balanced has the whole region's range, which costs its
    indices less than log2 P bits each.

    Args:
        ends: int64[P], where each region ends in the gathered list.
        shares: int64[P], consecutive parts of that list.
    """
    stops = shares.cumsum()
    first = np.searchsorted(ends, stops - shares, side="right")
    last = np.searchsorted(ends, stops - 1, side="right")
    spans = zip(shares.tolist(), first.tolist(), last.tolist(), strict=True)
    return [(int(boundaries[a]), int(boundaries[b + 1])) if share else (0, 0) for share, a, b in spans]


def _redistribute(
    kept: Entries,
    counts: NDArray[np.int64],
    splits: NDArray[np.int64],
    gathered: Entries,
    transport: Transport,
) -> Entries:
    """Move entries so that rank r holds gathered[splits[r]:splits[r + 1]], which is returned; before it held block r."""
    rank, size = transport.rank, transport.size
    ends = counts.cumsum()
    begins = ends - counts

    def overlap(holder: int, target: int) -> tuple[int, int]:
        start = max(int(begins[holder]), int(splits[target]))
        return start, max(start, min(int(ends[holder]), int(splits[target + 1])))

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
    return gathered[splits[rank] : splits[rank + 1]]


@dataclass(frozen=True)
class GatheredRegions:
    """Every region's sums, in one array.

    Attributes:
        entries: ENTRY[offsets[-1]]; region r lies in entries[offsets[r]:offsets[r + 1]], as COO, or as float32 values of the
            whole region, two to an entry.
        offsets: int64[P + 1].
        dense: bool[P], which regions are dense.
        boundaries: int64[P + 1]; region r is [boundaries[r], boundaries[r + 1]).
    """

    entries: Entries
    offsets: NDArray[np.int64]
    dense: NDArray[np.bool_]
    boundaries: NDArray[np.int64]

    def block(self, region: int) -> Entries:
        """ENTRY[...] of one region."""
        return self.entries[self.offsets[region] : self.offsets[region + 1]]


def allgather_regions(
    sums: Entries, counts: NDArray[np.int64], boundaries: NDArray[np.int64], transport: Transport
) -> GatheredRegions:
    """Deliver every rank's region to all ranks.

    Args:
        sums: ENTRY[counts[r]], this rank's region, ascending.
        counts: int64[P], entries of each region, equal on all ranks. Collective: every rank must call.
        boundaries: int64[P + 1], equal on all ranks.

    Returns:
        The regions; they lie in the transport's workspace until the next call.

    Traffic: min(2·nnz, length) words of every other rank's region received (rounded up to an even count if dense),
        ceil(log2 P) rounds.
    Source: Renggli et al., SparCML, SC 2019, section 5.3.
    """
    lengths = np.diff(boundaries)
    dense = ENTRY.itemsize * counts > WORD_BYTES * lengths
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
