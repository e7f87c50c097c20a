"""All gradients of a set of parameters in one vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class FlatGradients:
    """One vector that holds the gradients of all parameters, in their order and memory layout.

    Where it is of the parameters' type, each `p.grad` is a view of it and autograd writes into it. Where it is not, autograd
    makes tensors of its own, and `collect` casts them into it.

    Args:
        parameters: on one device, of one type, each dense in memory (`is_dense`).
        dtype: of the vector.

    Attributes:
        vector: [n] of `dtype`, on the parameters' device.
    """

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._parameters = parameters
        length = sum(p.numel() for p in parameters)
        self.vector = torch.zeros(length, dtype=dtype, device=parameters[0].device)
        self._views = dense_views(self.vector, parameters)
        self._shared = dtype == parameters[0].dtype

    def attach(self) -> None:
        """Make autograd write where `collect` finds it cheapest."""
        if not self._shared:
            for parameter in self._parameters:
                parameter.grad = None
            return
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def zero(self) -> None:
        """Forget all gradients."""
        if self._shared:
            self.vector.zero_()
        self.attach()

    def collect(self, gradients: Sequence[Tensor | None] | None = None) -> Tensor:
        """Bring gradients that autograd or the user put elsewhere into the vector, and return it; a missing one counts as zero.

        Args:
            gradients: one a parameter; each `p.grad` if not given.

        Raises:
            TypeError: a gradient is sparse.
        """
        if gradients is None:
            gradients = [parameter.grad for parameter in self._parameters]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for gradient, view in zip(gradients, self._views, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                refuse_sparse(gradient)
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        return self.vector


def refuse_sparse(gradient: Tensor) -> None:
    """Raise the TypeError of a gradient that is sparse."""
    if gradient.is_sparse:
        raise TypeError("a gradient is sparse; build the embedding with sparse=False")


def dense_views(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive pieces of a flat tensor, in the shapes and memory layouts of `like`."""
    views, start = [], 0
    for tensor in like:
        views.append(flat.as_strided(tensor.size(), tensor.stride(), start))
        start += tensor.numel()
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their piece of memory, in whatever order of dimensions: channels-last does, a slice does not."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 0:
            return True
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
