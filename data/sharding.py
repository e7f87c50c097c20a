"""Assigns samples to ranks and steps: index arithmetic that every rank computes alike.

All of it is a function of its arguments. No generator advances, so a run resumes at any (epoch, step) without
replaying what went before.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data import DataError

# Streams of random numbers within one (seed, epoch), so that order and augmentation are independent.
ORDER, AUGMENTATION, MASKING, TEMPO = 0, 1, 2, 4


def epoch_draws(count: int, seed: int, epoch: int, stream: int) -> NDArray[np.uint64]:
    """uint64[count]: a random number for each sample of an epoch, the same on every rank and every machine.

    Raw 64-bit output of Philox: NumPy promises that stream across its versions, and not that of its
    distributions. stream: ORDER, AUGMENTATION, MASKING or TEMPO.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(stream, epoch))
    return np.random.Philox(sequence).random_raw(count)


class ShardedBatches:
    """Training batches of one rank: every epoch a new order, cut into disjoint batches.

    Step s of an epoch takes the s-th run of size * batch_size samples in that epoch's order, and rank r the
    r-th part of them. What a step trains on together therefore depends on size * batch_size alone. The
    remainder that fills no step on all ranks is left out, another one in each epoch; every rank has the same
    number of steps.

    Args:
        count: samples in the training split.
        batch_size: samples per rank and step, at least 1.
        rank, size: this rank and the number of ranks, 0 <= rank < size.
        seed: at least 0, the same on all ranks.
        where: the samples are, for messages.

    Raises:
        DataError: fewer samples than ranks, or than one step of all ranks needs.
    """

    def __init__(
        self, count: int, *, batch_size: int, rank: int, size: int, seed: int, where: str = ""
    ) -> None:
        samples = f"{where}: {count} samples" if where else f"{count} samples"
        if count < size:
            raise DataError(f"{samples} are fewer than {size} ranks")
        if count < size * batch_size:
            raise DataError(
                f"{samples} are fewer than the {size * batch_size} of one step,"
                f" {size} ranks x {batch_size} samples per batch"
            )
        self.count = count
        self.batch_size = batch_size
        self.rank = rank
        self.size = size
        self.seed = seed
        self._ordered: tuple[int, NDArray[np.int64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, equal on all ranks and at least 1."""
        return self.count // (self.size * self.batch_size)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """int64[count], read-only: the order of an epoch, equal on all ranks."""
        if self._ordered is None or self._ordered[0] != epoch:
            draws = epoch_draws(self.count, self.seed, epoch, ORDER)
            permutation = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
            permutation.flags.writeable = False
            self._ordered = (epoch, permutation)
        return self._ordered[1]

    def indices(self, epoch: int, step: int) -> NDArray[np.int64]:
        """int64[batch_size], read-only: the samples that this rank trains on in one step of an epoch, in [0, steps_per_epoch)."""
        start = (step * self.size + self.rank) * self.batch_size
        return self.order(epoch)[start : start + self.batch_size]


def evaluation_batches(
    count: int, *, batch_size: int, rank: int, size: int, most: int = 0
) -> Iterator[NDArray[np.int64]]:
    """This rank's part of a set of which every sample is to be seen exactly once, as int64[1 ... batch_size] each.

    Parts are contiguous, and their lengths differ by at most 1; fewer samples than ranks leave some with none.
    The last batch may be short, and ranks may differ in the number of theirs.

    Args:
        count: samples of the set.
        batch_size: at least 1.
        rank, size: this rank and the number of ranks.
        most: so many samples at most, spread evenly over the set, the same on any number of ranks; 0: all.
    """
    used = min(most or count, count)
    shard = range(used * rank // size, used * (rank + 1) // size)
    parts = (shard[start : start + batch_size] for start in range(0, len(shard), batch_size))
    return (np.arange(part.start, part.stop, dtype=np.int64) * count // used for part in parts)
