"""Continue on another number of ranks or hosts: redistribute the residuals, so that nothing unsent is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from oktopk.levels import Layout

VECTORS = ("residual", "velocity")


def inherited_ranks(rank: int, ranks: int, saved_ranks: int) -> range:
    """The saved ranks whose residuals `rank` of `ranks` inherits; each is inherited exactly once. Also hosts of two levels.

    Empty where rank >= saved_ranks: such a rank starts without a residual.

    Raises:
        ValueError: a number of ranks < 1, or rank not in [0, ranks).
    """
    if min(ranks, saved_ranks) < 1:
        raise ValueError(f"{saved_ranks} saved and {ranks} new ranks are not at least 1 each")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not in [0, {ranks})")
    return range(rank, saved_ranks, ranks)


def of_rank(state: Any) -> Any:
    """A rank's own state without the key that has its rank; what has no such key, as in earlier versions, is returned as it is.

    Of `OkTopkState.state_dict()`, `OkTopkReplicas.state_dict()`, and of "reducer" and "tables" in
    `DistributedOptimizer.state_dict()`, which are `{"rank-0": (state,)}` on rank 0: `torch.distributed.checkpoint` keeps one of
    the values that ranks have under equal keys.
    """
    if isinstance(state, dict) and len(state) == 1:
        ((key, held),) = state.items()
        if str(key).startswith("rank-") and isinstance(held, tuple | list) and len(held) == 1:
            return held[0]
    return state


def redistribute(
    read: Callable[[int], dict[str, Any]],
    saved_ranks: int,
    rank: int,
    ranks: int,
    hosts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The state of one rank among another number of ranks, or of hosts, for `load_state_dict`. Talks to no other rank.

    The sums of the residuals and of the velocities over the ranks are kept: exactly on more ranks than before, to float32
    rounding on fewer. The next step computes exact thresholds and new region boundaries. On as many ranks as before, on the same
    hosts, it is the rank's own state, which continues bit for bit.

    Args:
        read: saved rank -> its `state_dict()`, of a `GradientAllreduce`, a `BucketedAllreduce`, a `DistributedOptimizer` or an
            `OkTopkState`. Called for those whose residuals this rank inherits, one at a time, and for `rank % saved_ranks`; of
            buckets once for each, with tables once more.
        saved_ranks: how many ranks saved their states.
        rank, ranks: this rank, and how many there are now.
        hosts: `GradientAllreduce.hosts` of the reducer that loads it: None for flat steps.

    Returns:
        A new state, without the key of `of_rank`; its vectors may be those of one that was read.

    Raises:
        ValueError: as `inherited_ranks`.

    Memory: one saved state beside the sum; in two levels a vector of n words more.

    Example:
        >>> hosts = optimizer.reducer.hosts
        >>> state = redistribute(lambda r: torch.load(f"optimizer-{r}.pt"), 4, comm.rank, comm.size, hosts)
        >>> optimizer.load_state_dict(state)
    """
    inherited = inherited_ranks(rank, ranks, saved_ranks)
    read = partial(_read, read)
    template = read(rank % saved_ranks)
    if template.get("tables") and ranks != saved_ranks:
        template = {**template, "tables": _tables(template["tables"], read, inherited)}
    own = template.get("reducer", template)
    if own is None:  # taken before the first step
        return template
    if "buckets" in own:
        buckets = {
            number: redistribute(_of_bucket(read, number), saved_ranks, rank, ranks, hosts)
            for number in own["buckets"]
        }
        reducer = {**own, "buckets": buckets}
        return {**template, "reducer": reducer} if "reducer" in template else reducer
    saved_hosts = own.get("hosts")
    new_hosts = None if hosts is None else list(hosts)
    if ranks == saved_ranks and new_hosts == saved_hosts:
        return template
    length = own.get("length", 0)
    before, after = _holders(saved_hosts, saved_ranks, length), _holders(new_hosts, ranks, length)
    index = next((number for number, holder in enumerate(after) if rank in holder), None)
    sums: dict[str, Any] = dict.fromkeys(VECTORS)
    if index is not None:
        for saved in inherited_ranks(index, len(after), len(before)):
            for name, vector in _whole_vectors(read, before[saved], saved_hosts, length).items():
                if vector is not None:
                    sums[name] = vector if sums[name] is None else sums[name] + vector
        if new_hosts is not None:
            layout = Layout(tuple(new_hosts), length)
            shard = after[index].index(rank)
            sums = {
                name: None if v is None else _as_read(layout.extract(v, shard), v) for name, v in sums.items()
            }
    # As after a change of k: thresholds and boundaries of the old ranks are not reused.
    changed = {**sums, "last_k": None, "rank": rank, "ranks": ranks, "hosts": new_hosts}
    if saved_hosts is not None or new_hosts is not None:
        changed["methods"] = {}  # regions are those of a shard
    if "reducer" in template:
        return {**template, "reducer": {**template["reducer"], **changed}}
    return {**template, **changed}


def _read(read: Callable[[int], dict[str, Any]], rank: int) -> dict[str, Any]:
    """A state of a rank, without the keys that have its rank."""
    state = of_rank(read(rank))
    return {**state, **{name: of_rank(state[name]) for name in ("reducer", "tables") if name in state}}


def _tables(
    template: dict[str, Any], read: Callable[[int], dict[str, Any]], inherited: range
) -> dict[str, Any]:
    """The states of tables with sparse gradients, whose residuals are added up: float32[length, width], or None."""
    tables = {name: dict(state) for name, state in template.items()}
    for state in tables.values():
        state["residual"] = None if state["residual"] is None else 0 * state["residual"]
    for saved in inherited:
        for name, held in read(saved)["tables"].items():
            if held["residual"] is not None:
                tables[name]["residual"] = tables[name]["residual"] + held["residual"]
    return tables


def _of_bucket(read: Callable[[int], dict[str, Any]], number: str) -> Callable[[int], dict[str, Any]]:
    """Reads the state of one bucket."""

    def read_bucket(rank: int) -> dict[str, Any]:
        state = read(rank)
        bucket: dict[str, Any] = state.get("reducer", state)["buckets"][number]
        return bucket

    return read_bucket


def _holders(hosts: Sequence[int] | None, ranks: int, length: int) -> list[list[int]]:
    """The ranks that hold one residual together: each rank by itself, or those of a host that hold its shards, in their order."""
    if hosts is None:
        return [[rank] for rank in range(ranks)]
    layout = Layout(tuple(hosts), length)
    holders = [rank for rank in range(ranks) if layout.shard_of(rank) is not None]
    return [[rank for rank in holders if hosts[rank] == host] for host in sorted(set(hosts))]


def _whole_vectors(
    read: Callable[[int], dict[str, Any]], holder: list[int], hosts: Sequence[int] | None, length: int
) -> dict[str, Any]:
    """Residual and velocity that some saved ranks hold together, float32[n] or None."""
    whole: dict[str, Any] = dict.fromkeys(VECTORS)
    kinds: dict[str, Any] = {}
    for shard, saved in enumerate(holder):
        state = read(saved)
        state = state.get("reducer", state)
        for name in VECTORS:
            if hosts is None:
                whole[name] = state[name]
            elif state[name] is not None:
                if whole[name] is None:
                    whole[name] = np.zeros(length, np.float32)
                Layout(tuple(hosts), length).insert(state[name], shard, whole[name])
                kinds[name] = state[name]
    return {name: _as_read(vector, kinds.get(name)) for name, vector in whole.items()}


def _as_read(vector: Any, template: Any) -> Any:
    """A vector of the kind that was read: a NumPy array, or a torch tensor."""
    convert = getattr(template, "new_tensor", None)
    return convert(vector) if isinstance(vector, np.ndarray) and convert is not None else vector
