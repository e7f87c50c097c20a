"""Continue on another number of ranks: redistribute the residuals, so that nothing unsent is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def redistribute(
    read: Callable[[int], dict[str, Any]], saved_ranks: int, rank: int, ranks: int
) -> dict[str, Any]:
    """The state of one rank among another number of ranks, for `load_state_dict`. Talks to no other rank.

    The sums of the residuals and of the velocities over the ranks are kept: exactly on more ranks than before, to float32
    rounding on fewer. The next step computes exact thresholds and new region boundaries. On as many ranks as before it is the
    rank's own state, which continues bit for bit.

    Args:
        read: saved rank -> its `state_dict()`, of a `GradientAllreduce` or of a `DistributedOptimizer`. Called for the ranks of
            `inherited_ranks`, one at a time, and for `rank % saved_ranks`.
        saved_ranks: how many ranks saved their states.
        rank, ranks: this rank, and how many there are now.

    Returns:
        A new state; its vectors may be those of one that was read.

    Raises:
        ValueError: as `inherited_ranks`.

    Memory: one saved state beside the sum.

    Example:
        >>> state = redistribute(lambda r: torch.load(f"optimizer-{r}.pt"), 4, comm.rank, comm.size)
        >>> optimizer.load_state_dict(state)
    """
    inherited = inherited_ranks(rank, ranks, saved_ranks)
    template = read(rank % saved_ranks)
    if ranks == saved_ranks:
        return template
    sums: dict[str, Any] = dict.fromkeys(VECTORS)
    for saved in inherited:
        state = read(saved)
        state = state.get("reducer", state)
        for name in VECTORS:
            vector, total = state[name], sums[name]
            if vector is not None:
                sums[name] = vector if total is None else total + vector
    # As after a change of k: thresholds and boundaries of the old ranks are not reused.
    changed = {**sums, "last_k": None, "rank": rank, "ranks": ranks}
    if "reducer" in template:
        return {**template, "reducer": {**template["reducer"], **changed}}
    return {**template, **changed}
