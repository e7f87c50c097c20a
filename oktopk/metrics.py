"""The paper's measures: xi of its convergence assumption, fill-in, balance of regions; and norms of update and residual."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude
from collectives.dense_allreduce import DenseAllreduce
from collectives.sparse import Array, SparseVector, Vector
from collectives.transport import Transport
from oktopk.backend import Backend
from oktopk.results import Measures
from oktopk.thresholds import kth_magnitude

_CHUNK = 1 << 20  # elements at a time, so that temporaries stay small


class Sampler:
    """Measures a sparse step from outside: sums before it, compares after it.

    Args:
        length: elements of the gradient (n).
        backend: of the gradients.
        transport: of the ranks; messages for measuring do not count as the step's traffic. Collective.

    Memory: 3n/2 words, kept from one measured step to the next. Of updates a measured step takes 2n more.
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

    def before(self, gradient: Array, residual: Vector | None, entered: Vector) -> None:
        """Sum the step's input over the ranks. Collective.

        Args:
            gradient: [n] of the gradient type.
            residual: float32[n] as the last step left it; None for zero. What an optimizer changed has been added.
            entered: the gradient, or what an optimizer changed since then.
        """

        def total(vector: Vector, added: Vector | None) -> None:
            """The sum over the ranks of vector + added, into the sampler's."""
            self._backend.kernels.accumulate(vector, added, self._vector)
            self._backend.wait()
            self._allreduce.run()

        self._backend.wait()  # so that `seconds` leaves out the backward pass and the step
        began = time.perf_counter()
        total(entered, None)
        squares = sum(_squares(self._vector[chunk].astype(np.float64)) for chunk in self._chunks())
        self._gradient_norm = math.sqrt(float(squares)) / self._transport.size
        total(gradient, residual)
        self._transport.take_traffic()
        self._seconds = time.perf_counter() - began

    def after(
        self,
        update: Vector,
        selected: SparseVector,
        k: int,
        to_sum: float,
        boundaries: NDArray[np.int64] | None,
    ) -> Measures:
        """Compare the sum with the step's result. Collective.

        Args:
            update: float32[n], as applied.
            selected: this rank's selection.
            k: entries wanted.
            to_sum: factor that turns the update into the sum over the ranks.
            boundaries: int64[P + 1], the regions; None for a method without.
        """
        self._backend.wait()  # so that `seconds` leaves out the backward pass and the step
        began = time.perf_counter()
        bits, larger, _ = kth_magnitude(partial(self._backend.kernels.magnitude_histogram, self._vector), k)
        threshold: Any = bits_magnitude(bits)
        ties: Any = k - larger  # as in every exact selection, the lowest indices first
        squares: Any = 0.0
        update_squares: Any = 0.0
        residual_squares: Any = 0.0
        for chunk in self._chunks():
            total = self._vector[chunk]
            magnitude = abs(total)
            tied = magnitude == threshold
            top = total * ((magnitude > threshold) | (tied & (tied.cumsum() <= ties)))
            ties = ties - tied.sum()
            applied = update[chunk].astype(np.float64) * to_sum
            squares = squares + _squares(top.astype(np.float64) - applied)
            update_squares = update_squares + _squares(applied)
            # nothing is lost, so this is the sum of the residuals
            residual_squares = residual_squares + _squares(total.astype(np.float64) - applied)
        indices = self._backend.indices(selected.entries)
        fill_in = self._union(indices) / k
        balance = math.nan if boundaries is None else self._balance(indices, boundaries)
        self._transport.take_traffic()
        seconds = self._seconds + time.perf_counter() - began
        missed, update_norm, residual_norm = (
            math.sqrt(float(each)) / self._transport.size
            for each in (squares, update_squares, residual_squares)
        )
        return Measures(missed, self._gradient_norm, fill_in, balance, update_norm, residual_norm, seconds)

    def close(self) -> None:
        """Free the persistent rounds."""
        self._allreduce.free()

    def _chunks(self) -> Iterator[slice]:
        length = len(self._vector)
        return (slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))

    def _union(self, indices: NDArray[np.int32]) -> int:
        """Indices that any rank has, counted once; one bit per element travels."""
        present = np.zeros(len(self._vector), np.bool_)
        present[indices] = True
        bits = np.packbits(present)
        self._transport.allreduce_or(bits)
        return int(np.count_nonzero(np.unpackbits(bits)))

    def _balance(self, indices: NDArray[np.int32], boundaries: NDArray[np.int64]) -> float:
        """The busiest region's entries over the mean of the regions; indices ascend."""
        counts = np.diff(np.searchsorted(indices, boundaries)).astype(np.int64)
        counts = self._transport.allreduce_control(counts)
        return float(counts.max() / counts.mean()) if counts.any() else math.nan


def _squares(vector: NDArray[np.float64]) -> Any:
    """The sum of squares, on the vector's device."""
    return (vector * vector).sum()
