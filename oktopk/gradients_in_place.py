"""The gradients of all parameters where autograd left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.cuda.multi_tensor import ScatteredGradient
from oktopk.torch.gradients import FlatGradients, refuse_sparse


class GradientsInPlace:
    """Hands the gradients of all parameters to steps that read them where they lie; in one vector only where one is asked for.

    Every `p.grad` is None until autograd hands a tensor of its own over, so that nothing is zeroed, added or copied before a step
    reads it. As one `FlatGradients` otherwise.

    Lifetime: what reads a gradient is on the stream before `p.grad` is None again. Its memory comes back on the stream that the
    backward pass ran on; where that is not the one that steps are on, it waits for them as for the parameters that they change.

    Args:
        parameters: on one device, of one type, each dense in memory (`is_dense`).
        dtype: of the vector.
        pieces: one a parameter, of the parameters' type.

    Memory: n elements of the vector, once it is asked for. A gradient that is not laid out as its parameter, once more.
    """

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype, pieces: ScatteredGradient) -> None:
        self._parameters, self._dtype, self._pieces = parameters, dtype, pieces
        self._strides = [parameter.stride() for parameter in parameters]
        self._flat: FlatGradients | None = None
        self._aside: list[Tensor | None] | None = None
        self._copies: dict[int, Tensor] = {}

    def lay_aside(self) -> None:
        """Keep the gradients until `attach`: each `p.grad` may be something else in between."""
        self._aside = [parameter.grad for parameter in self._parameters]

    def attach(self) -> None:
        """Give every `p.grad` what was laid aside, to which a further backward pass adds; None where nothing was."""
        aside, self._aside = self._aside or [None] * len(self._parameters), None
        for parameter, gradient in zip(self._parameters, aside, strict=True):
            parameter.grad = gradient

    def zero(self) -> None:
        """Forget all gradients."""
        self._aside = None
        self.attach()

    def place(self) -> ScatteredGradient:
        """The gradients as they are now, each where it lies; a missing one counts as zero.

        One that is of another type than its parameter, or in another order in memory, is copied first.

        Raises:
            TypeError: a gradient is sparse.
        """
        addresses = []
        for number, (parameter, strides) in enumerate(zip(self._parameters, self._strides, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                addresses.append(0)
                continue
            refuse_sparse(gradient)
            if gradient.dtype != parameter.dtype or not _same_order(gradient, strides):
                gradient = self._copied(number, gradient)
            addresses.append(gradient.data_ptr())
        self._pieces.place(addresses)
        return self._pieces

    def collect(self) -> Tensor:
        """[n] of `dtype`: the gradients in one vector, as they are now or were laid aside; a missing one is zero.

        Raises:
            TypeError: a gradient is sparse.
        """
        if self._flat is None:
            self._flat = FlatGradients(self._parameters, self._dtype)
        return self._flat.collect(self._aside)

    @property
    def vector(self) -> Tensor:
        """As `collect`."""
        return self.collect()

    def _copied(self, number: int, gradient: Tensor) -> Tensor:
        """A gradient in its parameter's type and order; the memory is kept for the next one."""
        parameter = self._parameters[number]
        if number not in self._copies:
            self._copies[number] = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
        return self._copies[number].copy_(gradient)


def _same_order(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the elements lie in memory as those of a dense tensor of the same shape do; a dimension of 1 has any stride."""
    mine = tensor.stride()
    return mine == strides or all(
        one == other or size == 1 for one, other, size in zip(mine, strides, tensor.size(), strict=True)
    )
