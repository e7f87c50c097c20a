"""What optimizers move parameters by, as a gradient that steps compute where they add it to the residual."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import Vector


class Displacement(ABC):
    """What an optimizer moves parameters by, with the sign of a gradient, computed where a step adds it to the residual.

    A finite displacement stays in the residual, whatever becomes of the step: none is taken out of it again. Where it or its sum
    with the residual is not finite, the residual stays as it was, and all ranks see the flag.

    Attributes:
        length: elements of all parameters (n).
        flagged: this rank's next steps count as not finite, on all ranks; what is finite stays in the residual all the same.
    """

    length: int
    flagged: bool = False


def is_flagged(gradient: object) -> bool:
    """Whether a gradient is a `Displacement` that counts as not finite."""
    return isinstance(gradient, Displacement) and gradient.flagged


class ParameterDisplacement(Displacement):
    """Element i is round(reference[i] - share · residual[i]) - parameter[i]: of an optimizer that has stepped.

    Product, difference, rounding to the parameters' type and the last difference are each rounded once, to nearest even, in
    float32; none is fused with another. So are those of `show`. Made by `GradientAllreduce.displacement`; see
    `oktopk.reference.step_of_updates`.

    Memory traffic: as a part of a step 12n bytes and the parameters.
    """

    @abstractmethod
    def set_pointers(self, addresses: Sequence[int]) -> None:
        """Set where the parameters lie from here on, as `GradientTensors.set_pointers`. 0: the displacement is zero there."""

    @abstractmethod
    def set_share(self, share: float) -> None:
        """Set the share of the next `show`, and of the steps behind it; to be called between a step and `show`."""

    @abstractmethod
    def show(self, residual: Vector, factors: Sequence[float] | None = None) -> None:
        """reference := factor · reference, then parameters := round(reference - share · residual), in one pass.

        Args:
            residual: float32[n].
            factors: one a parameter; None: 1 for each.

        Memory traffic: 8n bytes and the parameters; 4n more where a factor is not 1.
        """


class ShardDisplacement(ParameterDisplacement):
    """A displacement in two levels: this rank's shard, as a vector that the caller fills before each step.

    A step adds it to the shard of the residual before anything is sent, and leaves zeros in the vector.

    Args:
        whole: of all parameters; shows the residual of the whole host.
        vector: float32[shard], zero, its memory; empty for a rank that holds no shard.

    Attributes:
        nonfinite: in the step that runs this rank is flagged, or its shard or the sum with the residual is not finite.

    Memory traffic: as a part of a step 16n/G bytes for a shard of n/G elements.
    """

    def __init__(self, whole: ParameterDisplacement, vector: Vector) -> None:
        self.length, self.vector = whole.length, vector
        self.nonfinite = False
        self._whole = whole

    def set_pointers(self, addresses: Sequence[int]) -> None:
        self._whole.set_pointers(addresses)

    def set_share(self, share: float) -> None:
        self._whole.set_share(share)

    def show(self, residual: Vector, factors: Sequence[float] | None = None) -> None:
        self._whole.show(residual, factors)


ADAMW_TERMS = ("weight", "from_gradient", "beta2", "square", "rate", "root", "eps")
"""What AdamW's step takes of each tensor, as float32, see `AdamWDisplacement` and `adamw_terms`."""


class AdamWDisplacement(Displacement):
    """Element i is what AdamW moves parameter i by without decay; the pass that adds it to the residual updates the moments, too.

        m := fma(weight, g - m, m)                      # fma(weight, g - m, g) where from_gradient is 1
        v := fma(square · g, g, v · beta2)
        residual += (rate · m) / (sqrt(v) / root + eps)

    Each operation is rounded once, to nearest even, in float32, and none but the two is fused. So it is in torch's fused AdamW
    for x86 with FMA, but for up to 15 elements at the end of a tensor. Moments of 16 bits are rounded where they are stored; the
    third line takes them before. Made by `GradientAllreduce.adamw_displacement`.

    Memory traffic: as a part of a step 8n bytes, and gradients, and moments twice.
    """

    @abstractmethod
    def set_step(self, addresses: NDArray[np.int64], terms: NDArray[np.float32]) -> None:
        """Set what the next step reads. Work on the stream still reads what was set before.

        Args:
            addresses: int64[3, tensors], of the gradients, of m and of v, in the order of the vectors; dense, of one type. Where
                a gradient is at 0 the displacement is zero, and neither moment is touched.
            terms: float32[tensors, len(ADAMW_TERMS)], as `adamw_terms` makes a row.
        """


def adamw_terms(rate: float, betas: tuple[float, float], eps: float, steps: int) -> tuple[float, ...]:
    """A row of `AdamWDisplacement.set_step`, for the step with this number, counted from 1."""
    beta1, beta2 = betas
    weight = float(np.float32(1 - beta1))
    from_gradient = weight >= 0.5  # as torch interpolates: from the nearer end
    rate /= 1 - beta1**steps
    root = math.sqrt(1 - beta2**steps)
    return weight - from_gradient, float(from_gradient), beta2, 1 - beta2, rate, root, eps
