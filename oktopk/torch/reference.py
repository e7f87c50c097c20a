"""The parameters that all ranks agree on, and what a rank's own parameters make of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.torch.gradients import dense_views, is_dense

SAMPLES = 16
"""Elements of a parameter that are compared to find what a user has written."""

_BITS = {2: torch.int16, 4: torch.int32}


class Reference:
    """The reference: float32 values of all parameters, equal on all ranks, bit for bit.

    A rank's own parameters hold round(reference - share · residual), until its optimizer moves them.

    Args:
        parameters: on one device, of one type, each dense in memory (`is_dense`).
        share: of the residual that a rank's own parameters hold, in [0, 1].

    Attributes:
        vector: float32[n], the reference, parameter by parameter in their memory layout.
        views: of the vector, one a parameter.

    Memory: 8n bytes, the reference and scratch.
    """

    def __init__(self, parameters: Sequence[Tensor], share: float) -> None:
        self._parameters, self._share = list(parameters), share
        length, device = sum(p.numel() for p in parameters), parameters[0].device
        self.vector, self._scratch = torch.zeros(length, device=device), torch.zeros(length, device=device)
        self.views = dense_views(self.vector, parameters)
        self._scratch_views = dense_views(self._scratch, parameters)
        self._held = [parameter.detach() for parameter in parameters]
        self._in_scratch = False  # what the parameters held after the last `show`
        torch._foreach_copy_(self.views, self._held)
        self.watch()

    def displacement(self, residual: Tensor) -> Tensor:
        """What the parameters have moved since `show`: round(reference - share · residual) - parameters.

        Args:
            residual: float32[n], as at the last `show`.

        Returns:
            float32[n], scratch that is valid until another method is called.
        """
        self._follow()
        if not self._in_scratch:  # as `show` has left it
            self._compute_shown(residual)
        torch._foreach_sub_(self._scratch_views, self._held)
        self._in_scratch = False
        return self._scratch

    def show(self, residual: Tensor) -> None:
        """Make the parameters round(reference - share · residual)."""
        self._follow()
        self._compute_shown(residual)
        torch._foreach_copy_(self._held, self._scratch_views)
        self._in_scratch = True
        self.watch()

    def show_agreed(self) -> list[Tensor]:
        """Make the parameters round(reference), equal on all ranks. Returns copies of what they held, for `leave_agreed`."""
        self._follow()
        kept = [parameter.clone() for parameter in self._held]
        torch._foreach_copy_(self._held, self.views)
        self.watch()
        return kept

    def leave_agreed(self, kept: list[Tensor], residual: Tensor) -> None:
        """Make the parameters what they held before `show_agreed`, but for elements that were written to since.

        Those keep what was written, which becomes the reference; their residual becomes zero.
        """
        residuals = dense_views(residual, self.views)
        for number in self.written():
            agreed = self.views[number].to(kept[number].dtype)
            self._take(number, self._held[number] != agreed, residuals[number], kept[number])
        torch._foreach_copy_(self._held, kept)
        self.watch()

    def load(self, vector: Tensor) -> None:
        """Take float32[n] for the reference."""
        self.vector.copy_(vector)
        self._in_scratch = False

    def flat(self, held: Sequence[Tensor] | None = None) -> Tensor:
        """A copy of what the parameters hold, or of what is given, [n] of their type, in the order of the reference."""
        self._follow()
        held = self._held if held is None else list(held)
        whole = torch.empty(len(self.vector), dtype=held[0].dtype, device=self.vector.device)
        torch._foreach_copy_(dense_views(whole, self.views), held)
        return whole

    def hold(self, flat: Tensor) -> None:
        """Make the parameters what `flat` returned."""
        self._follow()
        torch._foreach_copy_(self._held, dense_views(flat, self.views))
        self.watch()

    def watch(self) -> None:
        """Note what the parameters hold: `written` finds what changes from now on."""
        self._follow()
        self._seen = [(p._version, p.data_ptr()) for p in self._parameters]
        self._samples = [_sample(held) for held in self._held]
        self._sample = torch.cat(self._samples)

    def written(self, by_version: bool = True) -> list[int]:
        """The parameters that may have changed since `watch`: by version, by address or by a sample of their elements.

        Args:
            by_version: name those, too, that were written to where no sample lies, and those that were written back.
        """
        now = [(p._version, p.data_ptr()) for p in self._parameters]
        moved = [
            number for number, (one, other) in enumerate(zip(now, self._seen, strict=True)) if one != other
        ]
        for number in moved:
            self._held[number] = self._parameters[number].detach()
            self._samples[number] = _sample(self._held[number])
        sample = torch.cat(self._samples)
        numbers = set(moved) if by_version else set()
        if not torch.equal(sample, self._sample):
            differs = (sample != self._sample).split([len(each) for each in self._samples])
            numbers |= {number for number, each in enumerate(differs) if bool(each.any())}
        return sorted(numbers)

    def take(self, numbers: Sequence[int], residual: Tensor | None) -> None:
        """Make elements that the parameters do not hold as `show` left them the reference.

        Args:
            numbers: of the parameters to compare.
            residual: float32[n], becomes zero where an element is taken; None: all elements are taken, and it stays.
        """
        self._in_scratch = False
        if residual is None:
            torch._foreach_copy_([self.views[n] for n in numbers], [self._held[n] for n in numbers])
            return
        self._compute_shown(residual)
        residuals = dense_views(residual, self.views)
        for number in numbers:
            self._take(number, self._held[number] != self._scratch_views[number], residuals[number])

    def _follow(self) -> None:
        """Look where the parameters lie now: `p.data = ...` and conversions move them."""
        for number, (parameter, held) in enumerate(zip(self._parameters, self._held, strict=True)):
            if parameter.data_ptr() != held.data_ptr() or parameter.stride() != held.stride():
                self._held[number] = parameter.detach()

    def _take(self, number: int, changed: Tensor, residual: Tensor, kept: Tensor | None = None) -> None:
        """Take elements of a parameter into the reference and, if given, into `kept`; their residual becomes zero."""
        held = self._held[number]
        self._in_scratch = False
        self.views[number].copy_(torch.where(changed, held.float(), self.views[number]))
        residual.masked_fill_(changed, 0)
        if kept is not None:
            kept.copy_(torch.where(changed, held, kept))

    def digest(self) -> int:
        """A hash of the reference, equal on all ranks: the sum of its bits as integers. Memory traffic: 4n bytes."""
        return int(self.vector.view(torch.int32).sum(dtype=torch.int64))

    def _compute_shown(self, residual: Tensor) -> None:
        """scratch := round(reference - share · residual), as float32."""
        if self._share:
            torch.sub(self.vector, residual, alpha=self._share, out=self._scratch)
        else:
            self._scratch.copy_(self.vector)
        dtype = self._held[0].dtype
        if dtype != torch.float32:
            self._scratch.copy_(self._scratch.to(dtype))


def _sample(tensor: Tensor) -> Tensor:
    """The bits of `SAMPLES` evenly spaced elements or of all, where these are fewer: a view, if the tensor is dense in memory."""
    size = tensor.numel()
    elements = tensor.as_strided((size,), (1,)) if is_dense(tensor) else tensor.reshape(-1)
    return elements[:: max(1, size // SAMPLES)].view(_BITS[tensor.element_size()])
