"""Continue on another number of ranks or hosts: redistribute the residuals, so that nothing unsent is lost."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from oktopk.damage import StateError
from oktopk.levels import Layout

_EQUAL = ("length", "width", "method", "wire", "exchange", "steps", "sparse_steps", "hosts")
"""Keys that the states of all ranks have alike."""


def inherited_ranks(rank: int, ranks: int, saved_ranks: int) -> range:
    """The saved ranks whose residuals `rank` of `ranks` inherits; each is inherited exactly once. Also hosts of two levels.

    Empty where rank >= saved_ranks: such a rank starts without a residual.

    Raises:
        ValueError: a number of ranks < 1 or that is no integer, or rank not in [0, ranks).
    """
    for number in (rank, ranks, saved_ranks):
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ValueError(f"{number!r} is no number of ranks")
    if min(ranks, saved_ranks) < 1:
        raise ValueError(f"{saved_ranks} saved and {ranks} new ranks are not at least 1 each")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not in [0, {ranks})")
    return range(rank, saved_ranks, ranks)


def of_rank(state: object) -> Any:
    """A rank's own state without the key that has its rank; what has no such key, as of `redistribute`, is returned as it is.

    Of `OkTopkState.state_dict()`, and of "reducer" and "tables" in `DistributedOptimizer.state_dict()`, which are
    `{"rank-0": (state,)}` on rank 0: `torch.distributed.checkpoint` keeps one of the values that ranks have under equal keys.
    """
    if isinstance(state, dict) and len(state) == 1:
        ((key, value),) = state.items()
        if str(key).startswith("rank-") and isinstance(value, tuple | list) and len(value) == 1:
            return value[0]
    return state


def redistribute(
    read: Callable[[int], dict[str, Any]],
    saved_ranks: int,
    rank: int,
    ranks: int,
    hosts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The state of one rank among another number of ranks, or of hosts, for `load_state_dict`. Talks to no other rank.

    The sum of the residuals over the ranks is kept: exactly on more ranks than before, to float32 rounding on fewer. The next
    step computes exact thresholds and new region boundaries. On as many ranks as before, on the same hosts, it is the rank's
    own state, which continues bit for bit.

    Of a `DistributedOptimizer` that sends updates the sum of the residuals over the number of ranks is kept: what the reference
    is still to move by. Steps since the last exchange are dropped. A replica's moments are the mean of those of the saved
    replicas whose residuals it inherits, of all where it inherits none; step counts are those of one.

    Args:
        read: saved rank -> its `state_dict()`, of a `GradientAllreduce`, a `BucketedAllreduce`, a `DistributedOptimizer` or an
            `OkTopkState`. Called for those whose residuals this rank inherits, one at a time, and for `rank % saved_ranks`; of
            buckets once for each, with tables or updates once more. Of updates "reducer", "updates" and, with tables, "tables"
            are enough.
        saved_ranks: how many ranks saved their states.
        rank, ranks: this rank, and how many there are now.
        hosts: `GradientAllreduce.hosts` of the reducer that loads it: None for flat steps.

    Returns:
        A new state, without the key of `of_rank`; its vectors may be those of one that was read. Where a state that was read
        cannot be, a state that `load_state_dict` refuses on all ranks, naming that rank: see `check_redistributed`.

    Raises:
        ValueError: as `inherited_ranks`, or as many hosts as there are no ranks.

    Memory: one saved state beside the sum, of updates beside the mean of the moments; in two levels a vector of n words more.

    Example:
        >>> hosts = optimizer.reducer.hosts
        >>> read = lambda r: torch.load(f"optimizer-{r}.pt", weights_only=True)
        >>> optimizer.load_state_dict(redistribute(read, 4, comm.rank, comm.size, hosts))
    """
    inherited_ranks(rank, ranks, saved_ranks)
    if hosts is not None and len(hosts) != ranks:
        raise ValueError(f"{len(hosts)} hosts are not those of {ranks} ranks")
    reader = _Reader(read, saved_ranks)
    try:
        return _redistributed(reader, saved_ranks, rank, ranks, hosts)
    except _BadStateError as error:
        # the other ranks may have read good ones alone: all are told when they load
        return {**reader.first, "problem": str(error)}


def saved_rank(state: object) -> tuple[int, int] | None:
    """The rank that a `DistributedOptimizer`'s state is of, and how many there were; None where it does not tell."""
    if not isinstance(state, dict) or not isinstance(reducer := of_rank(state.get("reducer")), dict):
        return None
    buckets = reducer.get("buckets")
    for part in (reducer, *(buckets.values() if isinstance(buckets, dict) else ())):
        rank, ranks = (part.get("rank"), part.get("ranks")) if isinstance(part, dict) else (None, None)
        if type(rank) is int and type(ranks) is int:
            return rank, ranks
    return None


def without_residual(
    state: dict[str, Any], rank: int, ranks: int, hosts: Sequence[int] | None
) -> dict[str, Any]:
    """A reducer's state as of a rank whose own was not saved: with its numbers of steps, without residual and thresholds."""
    if "buckets" in state:
        buckets = state["buckets"].items()
        return {
            **state,
            "buckets": {name: without_residual(each, rank, ranks, hosts) for name, each in buckets},
        }
    nothing: dict[str, Any] = {"residual": None, "last_k": None, "methods": {}}
    return {**state, **nothing, "rank": rank, "ranks": ranks, "hosts": None if hosts is None else list(hosts)}


def check_redistributed(state: object) -> None:
    """Raise StateError for what `redistribute` found wrong with the states that it read on this rank."""
    if isinstance(state, dict) and state.get("problem"):
        raise StateError(str(state["problem"]))


class _BadStateError(Exception):
    """A state that was read is not that of the rank asked for, or does not belong to the others."""


class _Reader:
    """Reads states, without the keys that have their rank, and compares each with the first one.

    Args:
        read, saved_ranks: as `redistribute`.

    Attributes:
        first: the state that was read first, {} where that was none.
    """

    def __init__(self, read: Callable[[int], dict[str, Any]], saved_ranks: int) -> None:
        self.first: dict[str, Any] = {}
        self._read, self._ranks = read, saved_ranks
        self._expected: dict[
            str, tuple[int, str]
        ] = {}  # what all have alike: the rank that had it first, its value

    def __call__(self, rank: int) -> dict[str, Any]:
        try:
            state = of_rank(self._read(rank))
            state = {
                **state,
                **{name: of_rank(state[name]) for name in ("reducer", "tables", "updates") if name in state},
            }
            if state.get("updates"):
                state |= state["updates"][
                    "optimizer"
                ]  # a distributed checkpoint has those of one rank beside it
        except Exception as error:  # whatever it is, it must not keep the others waiting
            raise _BadStateError(
                f"{self._named(rank)} cannot be read: {type(error).__name__} {error}"
            ) from error
        self.first = self.first or state
        try:
            common = _common(state, rank, self._ranks)
        except ValueError as error:
            raise _BadStateError(f"{self._named(rank)}: {error}") from error
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise _BadStateError(f"{self._named(rank)} is damaged: {type(error).__name__} {error}") from error
        for name, value in common.items():
            other, expected = self._expected.setdefault(name, (rank, value))
            if value != expected:
                had = f"that of saved rank {other} {expected}"
                raise _BadStateError(f"{self._named(rank)} has {name} {value}, {had}")
        return state

    @staticmethod
    def _named(rank: int) -> str:
        return f"the state of saved rank {rank}"


def _parts(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The states within a state, each of one reducer, bucket or table, and what to put before its keys to name them."""
    own = state.get("reducer", state)
    if own is not None and "buckets" in own:
        for number, bucket in own["buckets"].items():
            yield f"bucket {number}: ", bucket
    elif own is not None:
        yield "", own
    for number, table in (state.get("tables") or {}).items():
        yield f"table {number}: ", table


def _common(state: dict[str, Any], rank: int, ranks: int) -> dict[str, str]:
    """Name -> value, as text, of what the states of all ranks must have alike.

    Args:
        state: of one of `ranks` saved ranks, as `rank`.

    Raises:
        ValueError: it is of another rank or of other ranks, or a vector is not of the type and shape that this rank has.
    """
    own = state.get("reducer", state)
    names: dict[str, Any] = {"reducer": own is not None, "order": None if own is None else own.get("order")}
    if "reducer" in state and "buckets" in state:
        names["names of buckets"] = state["buckets"]
    parts = list(_parts(state))
    if state.get("updates"):
        names["shard"] = state["updates"].get("shard")
        names["reference"] = zlib.crc32(np.asarray(state["updates"]["reference"]).tobytes())
    names["buckets and tables"] = sorted(before for before, _ in parts)
    common = {name: repr(value) for name, value in names.items()}
    for before, part in parts:
        of = part.get("rank", rank), part.get("ranks", ranks)
        if of != (rank, ranks):
            raise ValueError(f"it is of rank {of[0]} of {of[1]}, not of rank {rank} of {ranks}")
        common |= {before + name: repr(part[name]) for name in _EQUAL if name in part}
        if "width" in part:  # a table, which holds no vectors
            continue
        shape = _vector_shape(part, rank, ranks)
        if shape != (0,):  # else it holds no shard
            common[before + "residual"] = _residual_kind(part["residual"], shape)
    return common


def _vector_shape(part: dict[str, Any], rank: int, ranks: int) -> tuple[int, ...] | None:
    """The shape of a rank's residual; None where a state has no length, as those of other reducers."""
    sizes = [part["length"]] if "length" in part else []
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"its length is {sizes}")
    hosts = part.get("hosts")
    if hosts is None:
        return tuple(sizes) or None
    if len(hosts) != ranks or any(type(host) is not int for host in hosts):
        raise ValueError(f"its hosts {hosts} are not those of {ranks} ranks")
    layout = Layout(tuple(hosts), sizes[0])
    return (layout.shard_length(layout.shard_of(rank)),)


def _residual_kind(vector: Any, shape: tuple[int, ...] | None) -> str:
    """What a residual is, as all ranks have it."""
    if vector is None:
        return "None"
    kind, sides = str(vector.dtype).removeprefix("torch."), tuple(vector.shape)
    if kind != "float32" or (shape is not None and sides != shape):
        raise ValueError(f"its residual is {kind}{list(sides)}, not float32{list(shape or sides)}")
    return f"{type(vector).__name__} float32" + (str(list(sides)) if shape is None else "")


def _redistributed(
    read: Callable[[int], dict[str, Any]],
    saved_ranks: int,
    rank: int,
    ranks: int,
    hosts: Sequence[int] | None,
) -> dict[str, Any]:
    """As `redistribute`, of states that were checked, or of one bucket of each."""
    template = read(rank % saved_ranks)
    own = template.get("reducer", template)
    if own is None:  # taken before the first step
        return template
    if "buckets" in own:
        buckets = {
            number: _redistributed(_of_bucket(read, number), saved_ranks, rank, ranks, hosts)
            for number in own["buckets"]
        }
        reducer = {**own, "buckets": buckets}
        return {**template, "reducer": reducer} if "reducer" in template else reducer
    saved_hosts = own.get("hosts")
    new_hosts = None if hosts is None else list(hosts)
    if ranks == saved_ranks and new_hosts == saved_hosts:
        return template
    length = own.get("length", 0)
    before = saved_ranks if saved_hosts is None else len(set(saved_hosts))
    after = ranks if new_hosts is None else len(set(new_hosts))
    layout = None if new_hosts is None else Layout(tuple(new_hosts), length)
    shard = None if layout is None else layout.shard_of(rank)
    total: Any = None
    index = rank if new_hosts is None else sorted(set(new_hosts)).index(new_hosts[rank])
    inherited = inherited_ranks(index, after, before)
    if layout is None or shard is not None:
        for saved in inherited:
            holder = _holder(saved_hosts, saved, length)
            residual = _whole_residual(read, holder, saved_hosts, length)
            if residual is not None:
                total = residual if total is None else total + residual
        if layout is not None and shard is not None and total is not None:
            total = _as_read(layout.extract(total, shard), total)
    like = own["residual"]
    if total is None and like is None and saved_hosts is not None:  # of a rank without a shard
        other = read(_holder(saved_hosts, 0, length)[0])
        like = other.get("reducer", other)["residual"]
    if total is None and like is not None:  # all ranks with a shard have one, or none has
        size = len(like) if length == 0 else length
        size = size if layout is None else layout.shard_length(shard)
        total = _as_read(np.zeros(size, np.float32), like)
    # As after a change of k: thresholds and boundaries of the old ranks are not reused.
    changed = {"residual": total, "last_k": None, "rank": rank, "ranks": ranks, "hosts": new_hosts}
    # no rank need have read the states of all: they are compared when they are loaded
    alike = _common(own, rank % saved_ranks, saved_ranks)
    changed["saved"] = {name: value for name, value in alike.items() if name != "residual"}
    if saved_hosts is not None or new_hosts is not None:
        changed["methods"] = {}  # regions are those of a shard
    if "reducer" not in template:
        return {**template, **changed}
    if updates := template.get("updates"):
        # of the mean over the ranks, which the reference is still to move by
        changed["residual"] = None if total is None else total * (ranks / saved_ranks)
        holders = (_holder(saved_hosts, saved, length) for saved in inherited or range(before))
        moments = (_whole_moments(read, holder, saved_hosts, length) for holder in holders)
        optimizer = {**updates["optimizer"], "state": _mean_moments(moments)}
        moved = between_exchanges(updates) | {"optimizer": optimizer}
        if updates.get("sharding") is not None:
            moved["sharding"] = []  # whole, each in one dimension
        template = {**template, "state": optimizer["state"], "updates": moved}
    return {**template, "reducer": {**template["reducer"], **changed}}


def between_exchanges(updates: dict[str, Any]) -> dict[str, Any]:
    """What a state has under "updates", as of a rank that has taken no step since the last exchange."""
    nothing = {"present": [0] * len(updates["present"]), "factors": [1.0] * len(updates["factors"])}
    return {**updates, "local": None, "steps": 0, "marked": {}, **nothing}


def _mean_moments(replicas: Iterable[dict[Any, Any]]) -> dict[Any, Any]:
    """Of each parameter what an optimizer keeps, as the mean over saved replicas; values that are equal on all stay as they are.

    Where it is no floating-point tensor with a dimension, as a number of steps or a moment in 8 bits, it is the first one's.
    """
    means: dict[Any, dict[str, Any]] = {}
    counts: Counter[Any] = Counter()
    for replica in replicas:
        for parameter, kept in replica.items():
            counts[parameter] += 1
            mean = means.setdefault(parameter, dict(kept))
            shaped = {name: value for name, value in kept.items() if getattr(value, "ndim", 0)}
            if all(value.is_floating_point() for value in shaped.values()):
                for name, value in shaped.items():
                    mean[name] = mean[name].lerp(value, 1 / counts[parameter])
    return means


def _whole_moments(
    read: Callable[[int], dict[str, Any]], holder: list[int], hosts: Sequence[int] | None, length: int
) -> dict[Any, Any]:
    """What an optimizer keeps of each parameter of one replica: in one dimension where the ranks have a piece each."""
    first = read(holder[0])
    sharding = first["updates"].get("sharding")
    if not sharding or hosts is None:
        return first["state"]
    layout, whole = Layout(tuple(hosts), length), {n: dict(values) for n, values in first["state"].items()}
    for shard, saved in enumerate(holder):
        state = read(saved)["state"]
        for number, (start, stop) in sharding[1].items():
            begin, end = next(iter(layout.spans_of_shard(((start, stop),), shard)), (0, 0))
            places = layout.places(shard, begin, end) - start
            for name, value in state.get(number, {}).items():
                if name != "step" and getattr(value, "shape", None) == (end - begin,):
                    if not shard:
                        whole[number][name] = value.new_zeros(stop - start)
                    whole[number][name][places] = value
    return whole


def _of_bucket(read: Callable[[int], dict[str, Any]], number: str) -> Callable[[int], dict[str, Any]]:
    """Reads the state of one bucket."""

    def read_bucket(rank: int) -> dict[str, Any]:
        state = read(rank)
        return state.get("reducer", state)["buckets"][number]

    return read_bucket


def _holder(hosts: Sequence[int] | None, number: int, length: int) -> list[int]:
    """The ranks that hold one residual together: one by itself, or those of a host that hold its shards, in their order."""
    if hosts is None:
        return [number]
    layout, host = Layout(tuple(hosts), length), sorted(set(hosts))[number]
    return [rank for rank, its in enumerate(hosts) if its == host and layout.shard_of(rank) is not None]


def _whole_residual(
    read: Callable[[int], dict[str, Any]], holder: list[int], hosts: Sequence[int] | None, length: int
) -> Any:
    """The residual that some saved ranks hold together, float32[n] or None."""
    whole = kind = None
    for shard, saved in enumerate(holder):
        state = read(saved)
        part = state.get("reducer", state)["residual"]
        if hosts is None:
            return part
        if part is not None:
            whole, kind = np.zeros(length, np.float32) if whole is None else whole, part
            Layout(tuple(hosts), length).insert(part, shard, whole)
    return _as_read(whole, kind)


def _as_read(vector: Any, template: Any) -> Any:
    """A vector of the kind that was read: a NumPy array, or a torch tensor."""
    convert = getattr(template, "new_tensor", None)
    return convert(vector) if isinstance(vector, np.ndarray) and convert is not None else vector
