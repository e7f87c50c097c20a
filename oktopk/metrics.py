"""The paper's measures: what its convergence assumption bounds, and how far the ranks' supports differ."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude
from collectives.dense_allreduce import DenseAllreduce
from collectives.sparse import SparseVector
from collectives.transport import Transport
from oktopk.backend import Backend
from oktopk.settings import selection_cap
from oktopk.thresholds import kth_magnitude

_CHUNK = 1 << 20  # elements handled at a time, so that temporaries stay small


@dataclass(frozen=True)
class Measures:
    """One measured step; xi and its parts are equal on all ranks.

    Attributes:
        missed: norm of (top k of the mean accumulated gradient) - (the update that was applied, as a mean).
        gradient_norm: norm of the mean gradient: of what entered the residuals, so after momentum correction.
        fill_in: entries that any rank selected, counted once, over k: 1 where all supports coincide, P where none meet.
        region_balance: entries that all ranks together selected in the busiest region, over the mean of the regions: what its
            rank receives and sums beside the others. 1 where they balance, P where one has all; NaN without regions.
        seconds: what measuring took on this rank, beside the step's own stages.
    """

    missed: float
    gradient_norm: float
    fill_in: float
    region_balance: float
    seconds: float

    @property
    def xi(self) -> float:
        """missed / gradient_norm; NaN where the mean gradient is zero. Convergence wants it bounded; the paper saw xi < P."""
        return self.missed / self.gradient_norm if self.gradient_norm else math.nan


class Sampler:
    """Measures a sparse step from outside: sums before it, compares after it.

    Args:
        length: elements of the gradient (n).
        backend: where gradients live.
        transport: where the ranks meet; what is sent here does not count as the step's traffic.

    Memory: 3n/2 words, kept from one measured step to the next.
    Traffic: two dense allreduces of n words, an allreduce of n bits and one of P int64 a measured step.
    Source: Li & Hoefler, PPoPP 2022, assumption 1.
    """

    def __init__(self, length: int, backend: Backend, transport: Transport) -> None:
        self._backend = backend
        self._transport = transport
        self._vector = backend.zeros(length)
        self._allreduce = DenseAllreduce(self._vector, transport)
        self._gradient_norm = math.nan
        self._seconds = 0.0

    def before(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        velocity: NDArray[np.float32] | None,
        momentum: float,
    ) -> None:
        """Sum what the step is about to see. Collective.

        Args:
            gradient: [n] of the gradient type.
            residual, velocity: float32[n] as the last step left them, None for zero; momentum: that of the velocity.
        """
        self._backend.wait()  # for what is not measuring: a backward pass, the step
        began = time.perf_counter()
        self._total(gradient, None, velocity, momentum)
        squares: Any = 0.0
        for piece in self._pieces():
            squares = squares + _squares(self._vector[piece].astype(np.float64))
        self._gradient_norm = math.sqrt(float(squares)) / self._transport.size
        self._total(gradient, residual, velocity, momentum)
        self._transport.take_traffic()
        self._seconds = time.perf_counter() - began

    def after(
        self,
        update: NDArray[np.float32],
        selected: SparseVector,
        k: int,
        to_sum: float,
        boundaries: NDArray[np.int64] | None,
    ) -> Measures:
        """Compare with what the step did. Collective.

        Args:
            update: float32[n], what is applied.
            selected: what this rank selected.
            k: entries that were asked for.
            to_sum: what makes the update the sum over the ranks.
            boundaries: int64[P + 1], the regions; None where there are none.
        """
        self._backend.wait()  # for what is not measuring: a backward pass, the step
        began = time.perf_counter()
        bits, larger = kth_magnitude(
            lambda level, prefix: self._backend.kernels.magnitude_histogram(self._vector, level, prefix), k
        )
        threshold: Any = bits_magnitude(bits)
        ties: Any = selection_cap(k) - larger  # as in every selection, the lowest indices first
        squares: Any = 0.0
        for piece in self._pieces():
            total = self._vector[piece]
            magnitude = abs(total)
            tied = magnitude == threshold
            top = total * ((magnitude > threshold) | (tied & (tied.cumsum() <= ties)))
            ties = ties - tied.sum()
            squares = squares + _squares(top.astype(np.float64) - update[piece].astype(np.float64) * to_sum)
        indices = self._backend.indices(selected.entries)
        fill_in = self._union(indices) / k
        balance = math.nan if boundaries is None else self._balance(indices, boundaries)
        self._transport.take_traffic()
        seconds = self._seconds + time.perf_counter() - began
        missed = math.sqrt(float(squares)) / self._transport.size
        return Measures(missed, self._gradient_norm, fill_in, balance, seconds)

    def close(self) -> None:
        """Give the requests back to MPI."""
        self._allreduce.free()

    def _total(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        velocity: NDArray[np.float32] | None,
        momentum: float,
    ) -> None:
        """The sum over the ranks of gradient + residual + momentum * velocity, into the vector."""
        self._backend.kernels.accumulate(gradient, residual, self._vector)
        if velocity is not None:
            for piece in self._pieces():
                self._vector[piece] += velocity[piece] * momentum
        self._backend.wait()
        self._allreduce.run()

    def _pieces(self) -> Iterator[slice]:
        length = len(self._vector)
        return (slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))

    def _union(self, indices: NDArray[np.int32]) -> int:
        """How many indices any rank has: one bit each travels."""
        mine = np.zeros(len(self._vector), np.bool_)
        mine[indices] = True
        bits = np.packbits(mine)
        self._transport.allreduce_or(bits)
        return int(np.count_nonzero(np.unpackbits(bits)))

    def _balance(self, indices: NDArray[np.int32], boundaries: NDArray[np.int64]) -> float:
        """The busiest region's entries over the mean of the regions; indices ascend."""
        counts = np.diff(np.searchsorted(indices, boundaries)).astype(np.int64)
        counts = self._transport.allreduce_control(counts)
        return float(counts.max() / counts.mean()) if counts.any() else math.nan


def _squares(vector: NDArray[np.float64]) -> Any:
    """The sum of squares, on the device that the vector is on."""
    return (vector * vector).sum()
