"""Gaussiank: TopkA with a threshold from a Gaussian fit, corrected when it misses."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude, magnitude_bits
from collectives.sparse import SparseVector, Vector
from oktopk.damage import StateError
from oktopk.methods.topka import TopkA
from oktopk.selection import LocalSelection, Selection
from oktopk.settings import selection_cap
from oktopk.step import Addend
from oktopk.thresholds import NOTHING

_ALL = 2**31 - 1  # ties


class GaussianSelection(LocalSelection):
    """Selects what lies as far out as the top k of a Gaussian with the vector's mean and deviation would.

    The fit is corrected by the ratio of the exact threshold to the fitted one, known from the last exact step. A count that
    misses k by more than a quarter on either side makes the step exact at once.

    Attributes:
        correction: exact threshold over fitted threshold, at the last exact step.
    """

    kept = (*LocalSelection.kept, "correction")
    correction = 1.0

    def select(
        self,
        gradient: Addend,
        residual: Vector,
        k: int,
        exact: bool,
        boundaries: NDArray[np.int64] | None = None,
    ) -> Selection:
        buffer = self.buffer(k)
        total, squares, nonfinite = self.kernels.accumulate_moments(gradient, residual)
        if nonfinite:
            self.needs_exact = True
            return Selection(SparseVector(buffer[:0], self.length), nonfinite, False, math.nan)
        fitted = self._fit(total, squares, k)
        exact = exact or self.needs_exact
        bits = NOTHING if exact else max(1, magnitude_bits(min(fitted * self.correction, 3e38)))
        nnz = 0 if exact else self.kernels.select_at_least(residual, bits, _ALL, buffer[: 2 * k])
        if exact or not 3 * k <= 4 * nnz or nnz > selection_cap(k):
            if exact or not k <= nnz <= 2 * k:
                nnz, bits = self._repack(residual, k, buffer)
            packed, bits = self._tighten(buffer[:nnz], nnz, k, bits)
            self.correction = bits_magnitude(bits) / fitted if fitted > 0 else 1.0
            exact = True
        else:
            packed = buffer[:nnz]
        return Selection(SparseVector(packed, self.length), 0, exact, bits_magnitude(bits))

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        super().check_state(state)
        if not 0 < (correction := state["correction"]) < math.inf:
            raise StateError(f"correction {correction!r} of the state is not a positive number")

    def _fit(self, total: float, squares: float, k: int) -> float:
        """The magnitude that k of n draws exceed, if they were Gaussian."""
        mean = total / self.length
        deviation = math.sqrt(max(0.0, squares / self.length - mean * mean))
        tail = min(k / (2 * self.length), 0.5)
        return abs(mean) + deviation * NormalDist().inv_cdf(1 - tail)


class Gaussiank(TopkA):
    """Selects by mean and deviation of the accumulated gradient, then allgathers.

    Gradients have heavier tails than a Gaussian, so that the plain fit selects too little; see `GaussianSelection`.

    Traffic: as TopkA, 2k(P-1) words a rank.
    Source: Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019.
    """

    name = "gaussiank"
    selection_type = GaussianSelection
