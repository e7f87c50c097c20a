"""Binomial trees rooted at rank 0, for any number of ranks."""

from __future__ import annotations

from collectives.sparse import Entries
from collectives.transport import Transport


def parent_and_children(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Neighbours of a rank in the binomial tree.

    Returns:
        (parent, children): None for rank 0; children in the order in which they report, nearest first.
    """
    children = []
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            children.append(rank + distance)
        distance *= 2
    return (rank - distance if rank else None), children


def broadcast(entries: Entries, count: int, transport: Transport) -> int:
    """Copy rank 0's list to all ranks, in place.

    Args:
        entries: ENTRY[m], m at least rank 0's count, equal on all ranks.
        count: entries of rank 0's list; ignored elsewhere. Collective.

    Returns:
        Entries of the list.

    Traffic: 2·count words to each rank but rank 0, ceil(log2 P) rounds.
    """
    parent, children = parent_and_children(transport.rank, transport.size)
    if parent is not None:
        count = transport.receive_counted(entries, parent)
    requests = []
    for child in reversed(children):  # the longest branch first
        requests += transport.send(entries[:count], child, even_if_empty=True)
    transport.wait(requests)
    return count
