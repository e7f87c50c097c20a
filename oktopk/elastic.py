"""Continue on another number of ranks: the state of reducers handed on so that nothing unsent is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

VECTORS = ("residual", "velocity")


def inherited_ranks(rank: int, ranks: int, saved_ranks: int) -> range:
    """The saved ranks whose residual goes to `rank` of `ranks`; every saved rank goes to exactly one.

    Empty for ranks that are more than there were: those start without.

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

    The sum of the residuals over the ranks is kept, and that of the velocities: exactly when there are more ranks than before,
    to float32's rounding when there are fewer. The next step names thresholds exactly and agrees on boundaries anew.

    Args:
        template: `GradientAllreduce.state_dict()` of saved rank `rank % saved_ranks`, for what is not redistributed.
        inherited: those of `inherited_ranks`, read one at a time.

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
    # As after a change of k: nothing that was measured or cut for other ranks is reused.
    return {**template, **sums, "last_k": None}
