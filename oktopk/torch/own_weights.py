"""Weights that an optimizer keeps beside its parameters, which an exchange of updates would not change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from oktopk.torch.shards import local_tensor

_NAMES = re.compile("^slow|master|lookahead|cached_param|old_p|^z$")
"""Of state that is weights, whatever it holds by now: Lookahead's, fp32 masters, SAM's, schedule-free averages, FTRL's."""

_DEPTH = 3
"""Lists within lists within attributes."""


def keeps_weights(optimizer: torch.optim.Optimizer, moved: Iterable[Tensor] | None = None) -> bool:
    """Whether an optimizer keeps weights of its own, as Lookahead and those with fp32 masters do, as far as can be told.

    Compared are names, and the tensors in state, groups and attributes with the parameters: before the first step, and behind the
    first one that moves them, which may have made them. Weights that a later step makes are not found.

    Args:
        moved: parameters that the optimizer has moved; others are equal to copies of their start. None: all are compared.
    """
    if "lookahead" in type(optimizer).__name__.lower():
        return True
    groups = optimizer.param_groups
    if any("lookahead" in str(name) for group in groups for name in group):
        return True
    parameters = [parameter for group in groups for parameter in group["params"]]
    if moved is not None:
        numbers = set(map(id, moved))
        parameters = [parameter for parameter in parameters if id(parameter) in numbers]
    states = [optimizer.state.get(parameter) or {} for parameter in parameters]
    if _names_weights(optimizer):
        return True
    for parameter, state in zip(parameters, states, strict=True):
        for name, value in state.items():  # "ax" is ASGD's average, which its steps do not read
            shaped = isinstance(value, Tensor) and value.shape == parameter.shape and name != "ax"
            if shaped and _copies(value, parameter):
                return True
    shapes: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    beside = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    beside.append(
        {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    )
    own = {local_tensor(parameter).data_ptr() for parameter in parameters}
    return any(
        _copies(value, parameter)
        for value in _tensors(beside, _DEPTH)
        if local_tensor(value).data_ptr() not in own
        for parameter in shapes.get(value.shape, ())
    )


def _names_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state has tensors of a parameter's shape under names that weights have."""
    return any(
        isinstance(value, Tensor) and value.shape == parameter.shape and _NAMES.search(str(name)) is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in (optimizer.state.get(parameter) or {}).items()
    )


def own_weights_sentence(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer that keeps weights cannot step before the exchange."""
    name = type(optimizer).__name__
    return f"{name} keeps weights beside the parameters, which an exchange would not change: take sends='gradients'"


def _copies(value: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor holds a parameter's values, and is no view of it. Constants are not compared: much is all ones.

    Of DTensors this rank's shards are compared.
    """
    value, parameter = local_tensor(value), local_tensor(parameter)
    if value.shape != parameter.shape:
        return False
    if not value.is_floating_point() or value.is_sparse or value.data_ptr() == parameter.data_ptr():
        return False
    values = parameter.detach()
    if value.device != values.device or values.numel() < 2 or bool((values == values.flatten()[0]).all()):
        return False
    return torch.equal(value.detach().to(values.dtype), values)


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif depth >= 0 and isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, depth - 1)
