"""Batches of one rank: which samples they have, and how they are cut from a split on a device.

Which samples a rank gets in a step is index arithmetic that every rank computes alike, a function of its arguments. No generator
advances, so a run resumes at any (epoch, step) without replaying what went before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypedDict, TypeVar, Unpack

import numpy as np
import torch
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
            self._ordered = (epoch, self._shuffled(epoch))
            self._ordered[1].flags.writeable = False
        return self._ordered[1]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        draws = epoch_draws(self.count, self.seed, epoch, ORDER)
        return np.argsort(draws, kind="stable").astype(np.int64, copy=False)

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


Batch = TypeVar("Batch")
Samples = NDArray[np.int64]
"""int64[batch], samples of a split."""
Draws = NDArray[np.uint64] | None
"""uint64[batch], a random number for each sample of a batch; None where they get none."""


class HeldOutPlace(TypedDict):
    """What part of a held-out split a rank gets, this rank of `size`, and how many samples a batch has at most."""

    batch_size: int
    rank: int
    size: int


class Place(HeldOutPlace):
    """What a rank trains on: batches of so many samples, shuffled by a seed of at least 0 that is the same on all ranks."""

    seed: int


class Source(ABC, Generic[Batch]):
    """A split, from which batches are cut. Its tensors lie on one device; on the host they may be mapped.

    Args:
        count: samples of the split.
        what: they are, for messages.
        where: the split is, for messages.

    Attributes:
        stream: of the random numbers that samples get, None where they get none.
        block: samples that are cut together in training, and those of one batch at least. More than those of one batch only where
            a batch is a named tuple of tensors; batches are then pieces of the block, not to be changed.
    """

    device = torch.device("cpu")
    stream: int | None = None
    block = 1

    def __init__(self, count: int, what: str, where: str = "") -> None:
        self._count, self._what, self._where = count, what, where

    def __len__(self) -> int:
        return self._count

    @abstractmethod
    def cut(self, samples: Samples, draws: Draws = None) -> Batch:
        """A batch, on the device; of speech and images that are held out without draws."""

    def to(self, device: torch.device) -> None:
        """Move all tensors, and cut batches there from now on. Raises DataError: they do not fit."""
        try:
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(self, name, value.to(device))
        except torch.OutOfMemoryError as error:
            raise DataError(f"{self._what} do not fit on {device}: {error}") from error
        self.device = device

    def placed(self, values: NDArray[np.int64]) -> torch.Tensor:
        """A plan on the device."""
        plan = torch.from_numpy(values)
        # from pageable memory the copy would wait for a GPU
        return plan.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else plan

    def training(self, **place: Unpack[Place]) -> EpochLoader[Batch]:
        """One rank's training batches. Raises DataError: fewer samples than ranks, or than one step of all ranks needs."""
        return EpochLoader(self, ShardedBatches(len(self), where=self._where, **place))

    def held_out(self, *, most: int = 0, **place: Unpack[HeldOutPlace]) -> HeldOut[Batch]:
        """One rank's part of the split in order, every sample once over all ranks, always with the same random numbers.

        Args:
            most: so many samples at most, spread evenly over the split, the same on any number of ranks; 0: all.
            place: of this rank.
        """
        draws = None if self.stream is None else epoch_draws(len(self), 0, 0, self.stream)
        return HeldOut(self, evaluation_batches(len(self), most=most, **place), draws)


class HeldOut(Generic[Batch]):
    """One rank's part of a held-out split, in batches.

    Ranks may have unequal numbers of samples and batches, or none; sum what was counted, never average averages.

    Args:
        source: what batches are cut from.
        batches: the samples of each.
        draws: a random number for each sample of the source.
    """

    def __init__(
        self,
        source: Source[Batch],
        batches: Iterable[Samples],
        draws: Draws = None,
    ) -> None:
        self.source, self._batches, self._draws = source, list(batches), draws

    def __iter__(self) -> Iterator[Batch]:
        for samples in self._batches:
            yield self.source.cut(samples, None if self._draws is None else self._draws[samples])


class EpochLoader(Generic[Batch]):
    """Training batches, shuffled anew in every epoch; each is a function of (seed, epoch, step, rank).

    So asking for a batch again, in another order, or after a restart gives the same bytes. What is drawn for a sample depends on
    (seed, epoch, sample) only: a run on another number of ranks with as many samples per step in total sees the same.

    Args:
        source: what batches are cut from.
        shards: which samples a batch has.
    """

    def __init__(self, source: Source[Batch], shards: ShardedBatches) -> None:
        self.source, self.shards = source, shards
        self._drawn: tuple[int, NDArray[np.uint64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, equal on all ranks and at least 1."""
        return self.shards.steps_per_epoch

    def _draws(self, epoch: int, samples: Samples) -> Draws:
        if self.source.stream is None:
            return None
        if self._drawn is None or self._drawn[0] != epoch:
            draws = epoch_draws(self.shards.count, self.shards.seed, epoch, self.source.stream)
            self._drawn = (epoch, draws)
        return self._drawn[1][samples]

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from first_step on: 0 for all of it, another to resume in its middle."""
        size = self.shards.batch_size
        together = max(1, self.source.block // size)
        for first in range(first_step, self.steps_per_epoch, together):
            steps = range(first, min(first + together, self.steps_per_epoch))
            samples = np.concatenate([self.shards.indices(epoch, step) for step in steps])
            block: Any = self.source.cut(samples, self._draws(epoch, samples))
            if len(steps) == 1:
                yield block
            else:
                for start in range(0, len(samples), size):
                    yield type(block)(*(tensor[start : start + size] for tensor in block))
            del block  # before the next one takes as much
