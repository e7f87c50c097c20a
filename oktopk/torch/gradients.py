"""The gradients of a set of parameters, as steps read them: each where autograd left it, or in one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.step import Spans
from oktopk.torch.as_wrapped import AsWrapped


def refuse_sparse(gradient: Tensor) -> None:
    """Raise the TypeError of a gradient that is sparse."""
    if gradient.is_sparse:
        raise TypeError(
            "a gradient is sparse: name its parameter in sparse=[...], or build the embedding with sparse=False"
        )


def dense_views(flat: Tensor, like: Sequence[Tensor], starts: Sequence[int] | None = None) -> list[Tensor]:
    """Views of a flat tensor, in the shapes and memory layouts of `like`, consecutive where no `starts` are given."""
    if starts is None:
        starts = [0, *accumulate(tensor.numel() for tensor in like)][:-1]
    return [
        flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset() + start)
        for tensor, start in zip(like, starts, strict=True)
    ]


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


def missing_spans(
    sizes: Sequence[int], present: Sequence[int | bool], starts: Sequence[int] | None = None
) -> Spans:
    """Where in a vector of several parts those lie that are not present.

    Args:
        sizes: elements of the parts.
        present: of each, whether it is.
        starts: where the parts begin; None: one after the other.
    """
    starts = [0, *accumulate(sizes)][:-1] if starts is None else starts
    spans: list[tuple[int, int]] = []
    for begin, size, here in zip(starts, sizes, present, strict=True):
        if here or not size:
            continue
        end = begin + size
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return tuple(spans)


class GradientsInPlace:
    """The gradients of all parameters where autograd left them.

    Every `p.grad` is None until autograd assigns a tensor of its own, so that nothing is zeroed or added before a step takes it,
    and a parameter without a gradient is known. A step reads them where they lie, or from one vector that they are copied into.

    Lifetime: a gradient is read on the step's stream before `p.grad` becomes None. If the backward pass runs on another stream,
    that stream waits for the step, as it must for the parameters.

    Args:
        parameters: on one device, of one type, each dense in memory (`is_dense`).
        dtype: of the vector.
        tensors: for each bucket a list of the tensors of its parameters, of their type; none where no step reads any.
        ranges: the parameters of each bucket.
        starts: where each parameter's gradient begins in the vector; None: one after the other.
        length: elements of the vector; None: those of the parameters.
        vector: [length], memory to take for the vector, zero; None: its own.

    Attributes:
        as_wrapped: what the parameters were at construction: gradients are laid out as they.
        views: of the vector, one a parameter; there once the vector is.

    Memory: the elements of the vector, once it is asked for. A gradient that is not laid out as its parameter was, once more.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
        tensors: Sequence[GradientTensors] = (),
        ranges: Sequence[slice] = (slice(None),),
        starts: Sequence[int] | None = None,
        length: int | None = None,
        vector: Tensor | None = None,
    ) -> None:
        self._parameters, self._dtype, self._tensors, self._ranges = parameters, dtype, tensors, ranges
        self._sizes = [parameter.numel() for parameter in parameters]
        self._starts = [0, *accumulate(self._sizes)][:-1] if starts is None else list(starts)
        self._length = sum(self._sizes) if length is None else length
        self._device = parameters[0].device
        self._vector_memory = vector
        self.as_wrapped = AsWrapped(parameters)
        self._vector: Tensor | None = None
        self.views: list[Tensor] = []
        self._aside: list[Tensor | None] | None = None
        self._copies: dict[int, Tensor] = {}

    @property
    def in_vector(self) -> bool:
        """Whether all steps read the vector."""
        return not self._tensors

    def lay_aside(self) -> None:
        """Keep the gradients until `attach`: each `p.grad` may be something else in between."""
        self._aside = [parameter.grad for parameter in self._parameters]

    def attach(self) -> None:
        """Give every `p.grad` what was laid aside, to which a further backward pass adds; None where nothing was."""
        aside, self._aside = self._aside or [None] * len(self._parameters), None
        for parameter, gradient in zip(self._parameters, aside, strict=True):
            parameter.grad = gradient

    def zero(self, set_to_none: bool = True) -> None:
        """Clear all gradients; with `set_to_none` False those that are there become zero, where they lie."""
        if not set_to_none:
            if self._aside is not None:
                self.attach()
            grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            with torch.no_grad():
                torch._foreach_zero_(grads)
            return
        self._aside = None
        for parameter in self._parameters:
            parameter.grad = None

    def missing(self, bucket: int = 0) -> Spans:
        """Where in a bucket, from its first element, no `p.grad` is."""
        numbers = range(len(self._parameters))[self._ranges[bucket]]
        present = [self._parameters[number].grad is not None for number in numbers]
        if all(present):
            return ()
        starts = [self._starts[number] - self._starts[numbers[0]] for number in numbers]
        return missing_spans([self._sizes[number] for number in numbers], present, starts)

    def tensors(self, bucket: int = 0, problem: str = "") -> tuple[GradientTensors, bool]:
        """The gradients of a bucket as they are now, each where it lies; a missing one counts as zero.

        One that is not as its parameter was, in type or order in memory, is copied first.

        Args:
            problem: why the step will not be taken: none is read.

        Returns:
            The list, and whether any was copied, which the current stream does.

        Raises:
            TypeError: a gradient is sparse.
        """
        addresses, copied = [], False
        numbers = range(len(self._parameters))[self._ranges[bucket]]
        for number in numbers:
            gradient = None if problem else self._parameters[number].grad
            if gradient is None:
                addresses.append(0)
                continue
            refuse_sparse(gradient)
            if not self.as_wrapped.fits(number, gradient):
                gradient, copied = self._copied(number, gradient), True
            addresses.append(gradient.data_ptr())
        self._tensors[bucket].set_pointers(addresses)
        return self._tensors[bucket], copied

    def collect(self, only: slice = slice(None), problem: str = "") -> Tensor:
        """The gradients in one vector, as they are now or were laid aside; a missing one is zero.

        Args:
            only: of these parameters.
            problem: as `tensors`: all are zero.

        Raises:
            TypeError: a gradient is sparse.
        """
        vector, gradients = self.filled, self._aside or [parameter.grad for parameter in self._parameters]
        copied: list[tuple[Tensor, Tensor]] = []
        for gradient, view in zip(gradients[only], self.views[only], strict=True):
            if gradient is None or problem:
                view.zero_()
            elif gradient is not view:
                refuse_sparse(gradient)
                copied.append((view, gradient))
        if copied:
            targets, sources = zip(*copied, strict=True)
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return vector

    @property
    def filled(self) -> Tensor:
        """The vector, as the last `collect` left it."""
        if self._vector is None:
            vector = self._vector_memory
            if vector is None:
                vector = torch.zeros(self._length, dtype=self._dtype, device=self._device)
            like = [self.as_wrapped.like(number, "meta") for number in range(len(self._parameters))]
            self._vector, self.views = vector, dense_views(vector, like, self._starts)
        return self._vector

    def _copied(self, number: int, gradient: Tensor) -> Tensor:
        """A gradient in its parameter's type and order; the memory is kept for the next one."""
        if number not in self._copies:
            self._copies[number] = self.as_wrapped.like(number)
        return self._copies[number].copy_(gradient)
