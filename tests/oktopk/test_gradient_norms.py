"""Norms of gradients, by torch and by a check that has summed their squares, lead to the same decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from oktopk.torch.updates.gradient_norms import GradientNorms

CPU = torch.device("cpu")


class Summed:
    """A check of gradients, as `StepCheck` reads it."""

    def __init__(self, gradients: list[torch.Tensor], differs: bool) -> None:
        self._gradients, self._differs = gradients, differs

    def read(self) -> tuple[float, bool]:
        squares = [each.square().sum() for each in self._gradients]  # above 1.8e19 Inf, as the kernel's
        return float(sum(map(float, squares))), self._differs


def both(gradients: list[torch.Tensor], differs: bool) -> tuple[GradientNorms, GradientNorms]:
    """The norms of copies: by torch, and by a check."""
    one, other = ([each.clone() for each in gradients] for _ in range(2))
    check: Any = Summed(other, differs)
    return GradientNorms(one, CPU), GradientNorms(other, CPU, check)


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize(
    ("largest", "finite", "finite_when_looked_at"),
    [
        (1.0, True, True),
        (1e18, True, True),
        (1e30, False, True),
        (math.nan, False, False),
        (math.inf, False, False),
    ],
)
def test_what_is_not_finite_and_what_is_written_are_seen(
    largest: float, finite: bool, finite_when_looked_at: bool, differs: bool
) -> None:
    gradients = [torch.randn(50), torch.randn(3, 4)]
    gradients[1][2, 3] = largest
    flags = [torch.tensor(1.0), torch.tensor(0.0)]
    for norms, written in zip(both(gradients, differs), (torch.tensor(differs), None), strict=True):
        assert norms.read(written, flags, square=True) == (differs, [True, False])
        assert norms.finite == finite
        if not finite:
            norms.look_closely(math.inf)
            assert norms.finite == finite_when_looked_at
        if norms.finite:
            assert norms.square == pytest.approx(
                float(sum(each.double().square().sum() for each in gradients))
            )


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [None, 40.0])
@pytest.mark.parametrize("most", [0.5, 1e9])
def test_gradients_are_clipped_by_one_rule(kind: torch.dtype, norm: float | None, most: float) -> None:
    """Scaled to a norm of `most`, or left as they are, bit for bit."""
    gradients = [torch.randn(50).to(kind), torch.randn(3, 4).to(kind)]
    whole = norm or math.sqrt(float(sum(each.double().square().sum() for each in gradients)))
    for norms, written in zip(both(gradients, False), (torch.tensor(False), None), strict=True):
        norms.read(written, [], square=False)
        norms.clip(most, norm)
        for before, after in zip(gradients, norms._gradients, strict=True):
            if most > whole:
                assert torch.equal(before, after)
            else:
                torch.testing.assert_close(after.float(), before.float() * (most / whole), rtol=1e-2, atol=0)
                assert not torch.equal(before, after)
