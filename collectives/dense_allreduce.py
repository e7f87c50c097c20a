"""Dense allreduce: Rabenseifner's algorithm on any number of ranks.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collectives.sparse import Vector
from collectives.transport import PersistentRound, Round, Transport


def dense_words(length: int, ranks: int) -> float:
    """Words per rank of `DenseAllreduce`, averaged over the ranks.

    2n(P-1)/P where P is a power of two. Otherwise, with p the power of two below P, the P - p surplus ranks fold in and
    out of a partner at 5n/2 words a pair: (2n(p-1) + 5n(P-p)/2) / P.
    """
    core = 1 << (ranks.bit_length() - 1)
    return (2 * length * (core - 1) + 2.5 * length * (ranks - core)) / ranks


class DenseAllreduce:
    """Sum one fixed vector over all ranks, in place, bit-identically on all of them.

    Recursive-halving reduce-scatter, then recursive-doubling allgather, over the largest power of two p <= P. Each of the
    P - p surplus ranks splits the vector with a partner before, and gets the result from it after. Each element is
    summed on one rank only, so that all ranks hold the same bits: those of a tree in rank order, which adds the first P - p pairs
    of neighbours, then neighbours among the p that are left, then pairs of those. All messages are persistent requests.

    Args:
        vector: float32[n], summed in place by `run`; must not move.
        transport: of the ranks. Collective: every rank must construct.

    Attributes:
        on_device: whether kernels of the ranks sum through peer memory; `run` then returns the same on all ranks, and there are
            `abort` and `check`.

    Memory: n/2 words of scratch.
    Traffic: `dense_words`; 2 log2 P messages a rank where P is a power of two.
    """

    on_device = False

    def __init__(self, vector: Vector, transport: Transport) -> None:
        self.vector = vector
        self._transport = transport
        self._scratch = transport.allocate((len(vector) + 1) // 2)
        # a round, then `incoming` added to `kept`; both may be empty
        self._reduce_steps: list[tuple[PersistentRound, Vector, Vector]] = []
        self._gather_steps: list[PersistentRound] = []
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
            self._reduce_steps.append((self._round(rank + 1, nothing, high), nothing, nothing))
            self._add_core_steps(rank // 2, core, surplus)
            self._gather_steps.append(self._round(rank + 1, vector, nothing))
        else:
            self._add_sum_step(rank - 1, outgoing=low, kept=high)
            self._reduce_steps.append((self._round(rank - 1, high, nothing), nothing, nothing))
            self._gather_steps.append(self._round(rank - 1, nothing, vector))

    def run(self, scale: float = 1.0) -> bool:
        """Sum over the ranks, times `scale`, into `vector`. Collective.

        Returns:
            Whether the sums that this rank took are finite. One rank takes each sum; none does where P is 1.
        """
        kernels = self._transport.kernels
        for exchange, kept, incoming in self._reduce_steps:
            exchange.run()
            if kept.size:
                kernels.add_values(kept, incoming)
        if not self._gather_steps and scale == 1.0:
            return True
        nonfinite = kernels.scale_values(self._owned, scale)
        for exchange in self._gather_steps:
            exchange.run()  # the first one sends what was scaled, so it waits for the stream
        return not (self._gather_steps and nonfinite[0])

    def free(self) -> None:
        """Free the persistent rounds."""
        for exchange in [*(step[0] for step in self._reduce_steps), *self._gather_steps]:
            exchange.free()

    def _add_core_steps(self, number: int, core: int, surplus: int) -> None:
        """Halve and double as number `number` of `core` ranks; those with a surplus partner come first."""
        start, stop = 0, len(self.vector)
        distance = 1  # neighbours first, as `dense_p2p.cu` adds
        while distance < core:
            middle = (start + stop) // 2
            kept, sent = slice(start, middle), slice(middle, stop)
            if number & distance:
                kept, sent = sent, kept
            other = number ^ distance
            partner = 2 * other if other < surplus else other + surplus
            own_half, other_half = self.vector[kept], self.vector[sent]
            self._add_sum_step(partner, outgoing=other_half, kept=own_half)
            self._gather_steps.insert(0, self._round(partner, own_half, other_half))
            start, stop = kept.start, kept.stop
            distance *= 2
        self._owned = self.vector[start:stop]

    def _add_sum_step(self, partner: int, outgoing: Vector, kept: Vector) -> None:
        incoming = self._scratch[: len(kept)]
        self._reduce_steps.append((self._round(partner, outgoing, incoming), kept, incoming))

    def _round(self, partner: int, outgoing: Vector, incoming: Vector) -> PersistentRound:
        return self._transport.persistent(Round(partner, outgoing, partner, incoming))
