"""Draws the rows of a table that the ranks of a bench touch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SKEWS = ("uniform", "zipf")


class RowSource:
    """Draws the rows that a rank touches, with repetition: uniformly, or row i with a chance in proportion to 1/(i + 1).

    Args:
        skew: a name in SKEWS.
        length: rows of the table.
        touched: rows drawn a rank and step.
    """

    def __init__(self, skew: str, length: int, touched: int, seed: int) -> None:
        self._length, self._touched, self._seed = length, touched, seed
        self._chances = np.cumsum(1.0 / np.arange(1, length + 1)) if skew == "zipf" else None

    def draw(self, rank: int, step: int) -> NDArray[np.int64]:
        """int64[touched], not ascending; the same for the same arguments."""
        rng = np.random.default_rng((self._seed, step, rank))
        if self._chances is None:
            return rng.integers(0, self._length, self._touched)
        drawn = np.searchsorted(self._chances, rng.random(self._touched) * self._chances[-1])
        return np.minimum(drawn, self._length - 1)
