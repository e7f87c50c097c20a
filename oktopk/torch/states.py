"""States as torch saves and loads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.transport import Transport
from oktopk.damage import StateError, state_errors

NOT_AN_OPTIMIZERS = "the state is not that of an optimizer: "


def by_rank(state: object, rank: int = 0) -> dict[str, Any]:
    """A rank's own state under a key with its rank, which `oktopk.elastic.of_rank` takes away.

    `torch.distributed.checkpoint` keeps one of the values that ranks have under equal keys. It saves a tuple as one value, so
    that a new process need not have tensors to load it into.

    Args:
        rank: where torch has no process group; else the rank there, as several groups may have such states.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    return {f"rank-{rank}": (state,)}


def not_saved_of(saved: tuple[int, int] | None, transport: Transport, also: str = "") -> str:
    """What is lost where every rank loads the state of one and the same rank, in a sentence; else "". Collective.

    Args:
        saved: as `oktopk.elastic.saved_rank` of this rank's state.
        also: what is lost beside residuals, as the end of a sentence.
    """
    everyone = set(transport.allgather_objects(saved))
    if saved is None or len(everyone) > 1 or (transport.size, saved[1]) == (1, 1):
        return ""
    rank, ranks = saved
    advice = "load that before the next step, see docs/frameworks.md"
    if transport.size != ranks:
        advice = f"turn the {ranks} states into {transport.size} by oktopk.elastic.redistribute"
    return (
        f"every rank has loaded the state of rank {rank} of {ranks}: the residuals of all ranks are lost{also}. Save each rank's "
        f"own state beside it, and {advice}"
    )


def as_tensors(state: object) -> Any:
    """A nested dict with tensors in place of arrays: torch.load reads those with weights_only, arrays not."""
    return _converted(state, np.ndarray, torch.from_numpy)


def as_arrays(state: object) -> Any:
    """A nested dict with arrays on the host in place of tensors."""
    return _converted(state, Tensor, lambda tensor: tensor.cpu().numpy())


def on_host(state: object) -> Any:
    """A nested dict with its tensors on the host; those that are there already are not copied."""
    return _converted(state, Tensor, Tensor.cpu)


def _converted(state: object, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {name: _converted(value, kind, convert) for name, value in state.items()}
    return convert(state) if isinstance(state, kind) else state


def check_replica(reducer: Any, hosts: list[int] | None, replica: str) -> None:
    """Raise StateError where a state of residuals is not of an optimizer's replicas, which has these `hosts` and `replica`."""
    if not isinstance(reducer, dict):
        return
    of_state = reducer.get("hosts")
    saved, own = ("rank" if each is None else "host" for each in (of_state, hosts))
    if saved != own:
        raise StateError(
            f"the state is of replica={saved!r}, and this optimizer has replica={replica!r}: pass replica={saved!r}, or "
            "make one of it by oktopk.elastic.redistribute with hosts=optimizer.hosts"
        )
    # of another number of ranks the reducer's own check says so
    if isinstance(of_state, list) and hosts is not None and of_state != hosts and len(of_state) == len(hosts):
        raise StateError(
            f"the state is of ranks on hosts {of_state}, and these ranks are on hosts {hosts}: make one of it by "
            "oktopk.elastic.redistribute with hosts=optimizer.hosts"
        )


@state_errors(what=NOT_AN_OPTIMIZERS)
def check_groups(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise StateError where a state's groups are not those of the optimizer."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != own:
        raise StateError(f"the state has groups of {saved} parameters, the optimizer of {own}")


@state_errors(what=NOT_AN_OPTIMIZERS)
def check_kept(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Raise StateError where what a state with the optimizer's groups keeps has another shape than its parameter."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in state["state"].get(number, {}).items():
            if name in _SHAPED and value is not None and value.shape != parameter.shape:
                of = tuple(parameter.shape)
                raise StateError(
                    f"the state has {name} of shape {tuple(value.shape)} of a parameter of shape {of}"
                )
            if name == "step" and not _is_count(value):
                raise StateError(f"the state is damaged: step {value!r} of a parameter")


def _is_count(value: object) -> bool:
    """Whether a value, perhaps in a tensor, may be a number of steps."""
    if isinstance(value, Tensor):
        return not value.is_complex() and bool(((value >= 0) & (value < float("inf"))).all())
    return isinstance(value, int | float | np.integer) and bool(0 <= value < float("inf"))


_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""What torch's optimizers keep in the shape of a parameter."""


def names_kept(state: dict[Any, Any]) -> dict[Any, list[str]]:
    """What an optimizer's state keeps of each parameter, by number; of those alone of which it keeps anything."""
    return {
        number: sorted(map(str, kept)) for number, kept in state.items() if isinstance(kept, dict) and kept
    }


def kept_difference(ranks: Sequence[dict[Any, list[str]]]) -> str:
    """What the states of some ranks lack, in a sentence; "" if nothing. Of a parameter without gradients a rank keeps nothing.

    Args:
        ranks: `names_kept` of each.
    """
    for number in dict.fromkeys(number for kept in ranks for number in kept):
        names_by_rank = {rank: set(kept[number]) for rank, kept in enumerate(ranks) if number in kept}
        every = set().union(*names_by_rank.values())
        if lacking := {
            rank: sorted(every - names) for rank, names in names_by_rank.items() if names != every
        }:
            listed = ", ".join(f"{', '.join(names)} on rank {rank}" for rank, names in lacking.items())
            return f"the optimizer's state of parameter {number} lacks {listed}, which other ranks have: it is damaged"
    return ""


def by_number(
    optimizer: dict[str, Any], groups: Sequence[dict[str, Any]], convert: Callable[[Any, Any], Any]
) -> dict[Any, Any]:
    """What an optimizer keeps by the numbers of its parameters, converted.

    Args:
        optimizer, groups: as `Replica.saved`.
        convert: (value, parameter) -> what becomes of a value that is kept of a parameter, but for its steps.
    """
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    of = dict(zip(numbers, parameters, strict=True))
    return {
        number: {
            name: value if name == "step" else convert(value, of[number]) for name, value in kept.items()
        }
        if number in of
        else kept
        for number, kept in optimizer["state"].items()
    }


def is_whole(value: object, parameter: Tensor) -> bool:
    """Whether something that is kept of a parameter has its shape, or as many elements in one dimension."""
    if not isinstance(value, Tensor):
        return False
    return value.shape == parameter.shape or value.shape == (parameter.numel(),)


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, and what is shaped like a parameter gets its memory layout too.

    A state that was written contiguously would else meet a channels-last parameter: fused optimizers then refuse, or on the CPU
    pair unlike elements.
    """
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            shaped = isinstance(value, Tensor) and value.shape == parameter.shape
            if shaped and value.stride() != parameter.stride():
                like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                kept[name] = like.copy_(value)
