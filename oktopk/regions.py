"""Regions: which rank reduces which part of the gradient."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from collectives.transport import Transport


def equal_boundaries(length: int, ranks: int) -> NDArray[np.int64]:
    """int64[ranks + 1]: regions of equal length."""
    return length * np.arange(ranks + 1, dtype=np.int64) // ranks


def region_boundaries(cuts: NDArray[np.int64], length: int, transport: Transport) -> NDArray[np.int64]:
    """Cut the gradient into one contiguous region per rank, balanced by nnz.

    Args:
        cuts: int64[P - 1], what this rank proposes: the points that split its own selection into equal counts.
        length: elements of the gradient (n).
        transport: where the ranks meet. Collective: every rank must call.

    Returns:
        int64[P + 1], ascending, equal on all ranks; rank r reduces [boundaries[r], boundaries[r + 1]). The cuts are the mean of
        what the ranks propose.

    Traffic: control only: one allreduce of P - 1 int64.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.1.
    """
    size = transport.size
    boundaries = equal_boundaries(length, size)
    boundaries[1:-1] = transport.allreduce_control(cuts) // size
    return boundaries
