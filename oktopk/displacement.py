"""What parameters have moved from where reference and residual put them, as a gradient that steps read in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Displacement(ABC):
    """Element i is round(reference[i] - share · residual[i]) - parameter[i], computed where a step adds it to the residual.

    Product, difference, rounding to the parameters' type and the last difference are each rounded once, to nearest even, in
    float32; none is fused with another. So are those of `show`. Made by `GradientAllreduce.displacement`; see
    `oktopk.reference.step_of_updates`.

    A finite displacement stays in the residual, whatever becomes of the step: none is taken out of it again. Where it or its sum
    with the residual is not finite, the residual stays as it was, and all ranks see the flag.

    Attributes:
        length: elements of all parameters (n).
        flagged: this rank's next steps count as not finite, on all ranks; what is finite stays in the residual all the same.

    Memory traffic: as a part of a step 12n bytes and the parameters.
    """

    length: int
    flagged: bool = False

    @abstractmethod
    def set_pointers(self, addresses: Sequence[int]) -> None:
        """Set where the parameters lie from here on, as `GradientTensors.set_pointers`. 0: the displacement is zero there."""

    @abstractmethod
    def show(self, residual: Any, factors: Sequence[float] | None = None) -> None:
        """reference := factor · reference, then parameters := round(reference - share · residual), in one pass.

        Args:
            residual: float32[n].
            factors: one a parameter; None: 1 for each.

        Memory traffic: 8n bytes and the parameters; 4n more where a factor is not 1.
        """


class ShardDisplacement(Displacement):
    """A displacement in two levels: this rank's shard, as a vector that the caller fills before each step.

    A step adds it to the shard of the residual before anything is sent, and leaves zeros in the vector.

    Args:
        whole: of all parameters; shows the residual of the whole host.
        vector: float32[shard], zero, its memory; empty for a rank that holds no shard.

    Attributes:
        nonfinite: in the step that runs this rank is flagged, or its shard or the sum with the residual is not finite.

    Memory traffic: as a part of a step 16n/G bytes for a shard of n/G elements.
    """

    def __init__(self, whole: Displacement, vector: Any) -> None:
        self.length, self.vector = whole.length, vector
        self.nonfinite = False
        self._whole = whole

    def set_pointers(self, addresses: Sequence[int]) -> None:
        self._whole.set_pointers(addresses)

    def show(self, residual: Any, factors: Sequence[float] | None = None) -> None:
        self._whole.show(residual, factors)
