"""What parameters were when they were wrapped, compared with what they are now; nothing here needs their gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

version_of = operator.attrgetter("_version")
gradient_of = operator.attrgetter("grad")
_What = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class AsWrapped:
    """Shape, memory layout, type and device of parameters, as they were at construction.

    `Module.to`, `Module._apply` and `parameter.data = ...` change them behind an optimizer's back.

    Args:
        parameters: to be watched.

    Attributes:
        changes: how often `look` has found a parameter elsewhere, or laid out otherwise, than before; 1 after the first one.
        relaid: the numbers of those whose elements lie in another order now, as of the last `look`.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._were = [_what(parameter) for parameter in parameters]
        self._seen: list[list[Any]] = []
        self._problem = ""
        self.changes = 0
        self.relaid: list[int] = []

    def look(self) -> None:
        """Compare, in some 0.3 microseconds a parameter."""
        now = [list(map(what, self._parameters)) for what in (Tensor.data_ptr, Tensor.stride, Tensor.numel)]
        if now == self._seen:
            return
        self._seen, self._problem, self.relaid = now, "", []
        self.changes += 1
        for number, (parameter, was) in enumerate(zip(self._parameters, self._were, strict=True)):
            problem = _change(was, parameter)
            self._problem = self._problem or problem
            if not problem and parameter.stride() != was[1]:
                self.relaid.append(number)

    def versions(self) -> list[int]:
        """Of each parameter how often torch has written to it."""
        return list(map(version_of, self._parameters))

    def count_write(self) -> None:
        """Let `versions`, and autograd, see a write to all of them that torch did not make."""
        torch.autograd.graph.increment_version(self._parameters)

    @property
    def problem(self) -> str:
        """What has changed that a step cannot go on with, in a sentence, as of the last `look`; "" if nothing has."""
        return self._problem

    def like(self, number: int, device: str | None = None) -> Tensor:
        """An empty tensor as a parameter was; on another device where one is given."""
        size, strides, dtype, was_on = self._were[number]
        return torch.empty_strided(size, strides, dtype=dtype, device=device or was_on)

    def fits(self, number: int, gradient: Tensor) -> bool:
        """Whether a gradient may be read as the parameter's memory was: of its shape, order, type and device."""
        size, strides, dtype, device = self._were[number]
        return (
            gradient.dtype == dtype
            and gradient.device == device
            and gradient.size() == size
            and _same_order(gradient, strides)
        )


def _what(parameter: Tensor) -> _What:
    return parameter.size(), parameter.stride(), parameter.dtype, parameter.device


def _change(was: _What, parameter: Tensor) -> str:
    """What of a parameter has changed, but for its values and their order in memory, in a sentence; "" if nothing has."""
    size, _, dtype, device = was
    names = {"shape": (tuple(size), tuple(parameter.size())), "type": (dtype, parameter.dtype)}
    names["device"] = (device, parameter.device)
    for name, (before, now) in names.items():
        if before != now:
            return (
                f"the {name} of a parameter of shape {tuple(size)} was {before} when it was wrapped, and is {now}: change the "
                "model first, then wrap its parameters"
            )
    return ""


def _same_order(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the elements lie in memory as those of a dense tensor of the same shape do; a dimension of 1 has any stride."""
    own = tensor.stride()
    return own == strides or all(
        one == other or size == 1 for one, other, size in zip(own, strides, tensor.size(), strict=True)
    )
