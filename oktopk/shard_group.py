"""What ranks that hold the shards of one vector learn of the whole of it, to select together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.transport import Transport


class ShardGroup:
    """The ranks that hold the shards of one vector. Its calls are collective among them.

    Args:
        holders: transport among them, in the order of their shards; None for a rank that holds all
            of the vector, which then sends nothing.
    """

    def __init__(self, holders: Transport | None = None) -> None:
        self._holders = holders

    def sum(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elementwise sum of int64[m] over the shards. Traffic: a control allreduce of it."""
        return counts if self._holders is None else self._holders.allreduce_control(counts)

    def sum_flagged(self, count: int, flag: bool) -> tuple[int, bool]:
        """The sum of a count over the shards, and whether any flag is up. Traffic: `sum` of 2."""
        if self._holders is None:
            return count, flag
        total, flags = self.sum(np.array([count, flag], np.int64)).tolist()
        return total, flags > 0

    def below(self, count: int) -> int:
        """The sum of a count over the shards below this rank's. Traffic: an allgather of it."""
        if self._holders is None:
            return 0
        counts = self._holders.allgather_control(np.array([count], np.int64))
        return int(counts[: self._holders.rank].sum())


WHOLE = ShardGroup()
"""Of a rank that holds all of its vector."""
