"""Continue on another number of ranks: redistribute the residuals, so that nothing unsent is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

VECTORS = ("residual", "velocity")


def inherited_ranks(rank: int, ranks: int, saved_ranks: int) -> range:
    """The saved ranks whose residuals `rank` of `ranks` inherits; each is inherited exactly once.

    Empty where rank >= saved_ranks: such a rank starts without a residual.

    Raises:
        ValueError: a number of ranks < 1, or rank not in [0, ranks).
    """
    if min(ranks, saved_ranks) < 1:
        raise ValueError(f"{saved_ranks} saved and {ranks} new ranks are not at least 1 each")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not in [0, {ranks})")
    return range(rank, saved_ranks, ranks)


def redistributed_state(template: dict[str, Any], inherited: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The state of one reducer among another number of ranks, for `GradientAllreduce.load_state_dict`.

    The sums of the residuals and of the velocities over the ranks are kept: exactly on more ranks than before, to float32
    rounding on fewer. The next step computes exact thresholds and new region boundaries.

    Args:
        template: `GradientAllreduce.state_dict()` of saved rank `rank % saved_ranks`, for all that is not redistributed.
        inherited: the states of `inherited_ranks`, read one at a time.

    Returns:
        A new state; the vectors may be those of an inherited one.

    Memory: one saved state beside the sum.
    """
    sums: dict[str, NDArray[np.float32] | None] = dict.fromkeys(VECTORS)
    for state in inherited:
        for name in VECTORS:
            vector, total = state[name], sums[name]
            if vector is not None:
                sums[name] = vector if total is None else total + vector
    # As after a change of k: thresholds and boundaries of the old ranks are not reused.
    return {**template, **sums, "last_k": None}
