"""Norms of the gradients that an optimizer is about to step on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from oktopk.cuda.step_check import StepCheck

_MOST_UNSEEN = 1e19
"""A larger norm, of one gradient or of all, may be that of one which is not finite, or too large: its square overflows."""


class GradientNorms:
    """Norms of gradients, which a GPU begins to compute here; `read` waits for it.

    A check sums in float64, torch in float32: with the same gradients ranks clip alike, bit for bit, where all or none have one.

    Args:
        gradients: those that are there.
        device: of them.
        check: the check that has begun to sum their squares; None: torch computes the norm of each.

    Attributes:
        finite: whether all are, as far as has been looked.
        square: of the norm of all, where there is a check, `read` was asked for it or `look_closely` has looked.
    """

    def __init__(self, gradients: list[Tensor], device: torch.device, check: StepCheck | None = None) -> None:
        self._gradients, self._device, self._check = gradients, device, check
        self._norms: Tensor | None = None  # of each gradient
        if check is None:
            each = torch._foreach_norm(gradients, dtype=torch.float32) if gradients else ()
            self._norms = torch.stack(each) if each else torch.zeros(1, device=device)
        self.finite, self.square = True, 0.0

    def read(self, written: Tensor | None, flags: Sequence[Tensor], square: bool) -> tuple[bool, list[bool]]:
        """Wait for the norms. Returns whether a sample was written to, and other flags.

        Args:
            written: bool[], of the first; None where there is a check, which has compared samples.
            square: whether `square` is to be known.
        """
        read = [flag.reshape(()).to(self._device).bool() for flag in flags]
        if self._check is not None:
            values = torch.stack(read).tolist() if read else []
            self.square, differs = self._check.read()
            self.finite = self.square <= _MOST_UNSEEN**2
            return differs, values
        assert self._norms is not None and written is not None
        read += [written, (self._norms <= _MOST_UNSEEN).all()]
        if square:
            whole = self._norms.double().square().sum()
            *values, self.square = torch.stack([*(flag.double() for flag in read), whole]).tolist()
        else:
            values = torch.stack(read).tolist()
        *others, differs, self.finite = map(bool, values)
        return differs, others

    def look_closely(self, most: float) -> None:
        """Where a norm was large, find out whether all gradients are finite, with norms up to `most`."""
        if not all(bool(torch.isfinite(each).all()) for each in self._gradients):
            return
        self._norms = torch.stack(torch._foreach_norm(self._gradients, dtype=torch.float64))
        self.finite = bool((self._norms <= most).all())
        self.square = float(self._norms.square().sum())

    def clip(self, most: float, norm: float | None) -> None:
        """Scale the gradients down to a norm of `most`.

        Args:
            norm: of the gradient that these are a part of; None: they are all.
        """
        if not self._gradients:
            return
        kind = self._gradients[0].dtype
        if self._norms is None:  # the host knows the norm already
            whole = torch.tensor(math.sqrt(self.square) if norm is None else norm, dtype=torch.float64)
            scale = _scale(most, whole).to(kind).item()
            if scale != 1.0:  # else all would be read and written for nothing
                torch._foreach_mul_(self._gradients, scale)
            return
        own = self._norms
        whole = own.norm() if norm is None else own.new_tensor(norm, dtype=torch.float64)
        torch._foreach_mul_(self._gradients, _scale(most, whole).to(kind))


def _scale(most: float, norm: Tensor) -> Tensor:
    """By what gradients of a norm are multiplied so that it is at most so large."""
    return (most / (norm + 1e-6)).clamp(max=1.0)


def most_norm(groups: Sequence[dict[str, Any]], ranks: int) -> float:
    """The largest norm of a gradient that an optimizer steps on, where gradients are not clipped.

    What one step moves by, momentum in later steps included, must not bring residuals, or their sum over the ranks, to the
    largest float: where steps are skipped these stay as they are. Residuals of dozens of steps on gradients as large still may;
    see `ReplicaResidual.bound`.
    """
    rates = [(float(each.get("momentum") or 0), float(each.get("lr") or 0)) for each in groups]
    left = min((1 - momentum) / max(1.0, rate) for momentum, rate in rates)
    return left * torch.finfo(torch.float32).max / 4 / ranks
