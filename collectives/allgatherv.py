"""Allgatherv of COO blocks by recursive doubling, for any number of ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.mpi import Transport


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
