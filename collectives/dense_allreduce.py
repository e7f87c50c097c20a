"""Dense allreduce: Rabenseifner's algorithm on any number of ranks.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.mpi import PersistentRound, Round, Transport


@dataclass(frozen=True)
class _Step:
    """Exchange, then add what came to what is kept; both may be empty."""

    exchange: PersistentRound
    kept: NDArray[np.float32]
    incoming: NDArray[np.float32]


class DenseAllreduce:
    """Sum one fixed vector over all ranks, in place, bit-identically on all of them.

    Recursive-halving reduce-scatter, then recursive-doubling allgather, over the largest power of two p <= P. Each of the
    P - p surplus ranks splits the vector with a partner before, and gets the result from it after. Each element is
    summed on one rank only, so that all ranks hold the same bits. All messages are persistent requests.

    Args:
        vector: float32[n], summed in place by `run`; must not move.
        transport: where the ranks meet.

    Memory: n/2 words of scratch.
    Traffic: `collectives.traffic.dense_words`; 2 log2 P messages a rank where P is a power of two.
    """

    def __init__(self, vector: NDArray[np.float32], transport: Transport) -> None:
        self.vector = vector
        self._transport = transport
        self._scratch = transport.allocate((len(vector) + 1) // 2)
        self._reduce_steps: list[_Step] = []
        self._gather_steps: list[_Step] = []
        self._owned = vector[:0]
        rank, size = transport.rank, transport.size
        core = 1 << (size.bit_length() - 1)
        surplus = size - core
        low, high = vector[: len(vector) // 2], vector[len(vector) // 2 :]
        nothing = vector[:0]

        if rank >= 2 * surplus:
            self._add_core_steps(rank - surplus, core, surplus)
        elif rank % 2 == 0:
            self._add_sum_step(rank + 1, outgoing=high, kept=low)
            self._reduce_steps.append(self._plain_step(rank + 1, outgoing=nothing, incoming=high))
            self._add_core_steps(rank // 2, core, surplus)
            self._gather_steps.append(self._plain_step(rank + 1, outgoing=vector, incoming=nothing))
        else:
            self._add_sum_step(rank - 1, outgoing=low, kept=high)
            self._reduce_steps.append(self._plain_step(rank - 1, outgoing=high, incoming=nothing))
            self._gather_steps.append(self._plain_step(rank - 1, outgoing=nothing, incoming=vector))

    def run(self, scale: float = 1.0) -> None:
        """Sum over the ranks, times `scale`, into `vector`. Collective."""
        kernels = self._transport.kernels
        for step in self._reduce_steps:
            step.exchange.run()
            if step.kept.size:
                kernels.add_values(step.kept, step.incoming)
        if scale != 1.0 and self._owned.size:
            kernels.scale_values(self._owned, scale)
        for step in self._gather_steps:
            step.exchange.run()

    def free(self) -> None:
        """Give the persistent requests back to MPI."""
        for step in self._reduce_steps + self._gather_steps:
            step.exchange.free()

    def _add_core_steps(self, place: int, core: int, surplus: int) -> None:
        """Halve and double among the `core` ranks; those with a surplus partner come first."""
        start, stop = 0, len(self.vector)
        distance = core // 2
        while distance:
            middle = (start + stop) // 2
            kept, given = slice(start, middle), slice(middle, stop)
            if place & distance:
                kept, given = given, kept
            other = place ^ distance
            partner = 2 * other if other < surplus else other + surplus
            self._add_sum_step(partner, outgoing=self.vector[given], kept=self.vector[kept])
            self._gather_steps.insert(
                0, self._plain_step(partner, outgoing=self.vector[kept], incoming=self.vector[given])
            )
            start, stop = kept.start, kept.stop
            distance //= 2
        self._owned = self.vector[start:stop]

    def _add_sum_step(self, partner: int, outgoing: NDArray[np.float32], kept: NDArray[np.float32]) -> None:
        incoming = self._scratch[: len(kept)]
        exchange = self._transport.persistent(Round(partner, outgoing, partner, incoming))
        self._reduce_steps.append(_Step(exchange, kept, incoming))

    def _plain_step(
        self, partner: int, outgoing: NDArray[np.float32], incoming: NDArray[np.float32]
    ) -> _Step:
        nothing = self.vector[:0]
        return _Step(
            self._transport.persistent(Round(partner, outgoing, partner, incoming)), nothing, nothing
        )
