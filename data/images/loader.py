"""Batches of images as torch tensors, sharded by rank."""

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from data.images.dataset import Augment, ImageSet
from data.sharding import (
    AUGMENTATION,
    ShardedBatches,
    check_rank,
    epoch_draws,
    evaluation_batches,
    evaluation_shard,
)

Batch = tuple[torch.Tensor, torch.Tensor]


class TrainingSource(Protocol):
    """One rank's training batches, wherever they come from."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, equal on all ranks and at least 1."""
        ...

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from first_step on."""
        ...


class EvaluationSource(Protocol):
    """One rank's part of the test split."""

    def __iter__(self) -> Iterator[Batch]:
        """Every sample of the part once."""
        ...


class TrainingLoader:
    """One rank's training batches, shuffled and augmented anew in every epoch.

    A batch is a function of (seed, epoch, step, rank): asking for it again, in another order, or after a
    restart gives the same bytes. How a sample is cropped and flipped depends on (seed, epoch, sample) only,
    so a run on another number of ranks with as many samples per step in total sees the same pixels.

    Args:
        images: the training split.
        batch_size: samples per rank and step.
        rank, size: this rank and the number of ranks.
        seed: at least 0, the same on all ranks.
        augment: crop and flip; None for neither.

    Raises:
        DataError: fewer samples than ranks, or than one step of all ranks needs.
        ValueError: another argument out of bounds; a crop of more than half the image.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        batch_size: int,
        rank: int,
        size: int,
        seed: int,
        augment: Augment | None = None,
    ) -> None:
        self.shards = ShardedBatches(len(images), batch_size=batch_size, rank=rank, size=size, seed=seed)
        if augment is not None and augment.crop > min(images.shape[1:]) // 2:
            raise ValueError(
                f"crop {augment.crop} is not in [0, {min(images.shape[1:]) // 2}], half the image"
            )
        self.images = images
        self.augment = augment
        self._drawn: tuple[int, NDArray[np.uint64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, equal on all ranks and at least 1."""
        return self.shards.steps_per_epoch

    def batch(self, epoch: int, step: int) -> Batch:
        """The batch of one step.

        Args:
            epoch: at least 0.
            step: within the epoch, 0 <= step < steps_per_epoch.

        Returns:
            float32[batch_size, channels, height, width], standardised, and int64[batch_size], the labels.

        Raises:
            ValueError: epoch or step out of bounds.
        """
        indices = self.shards.indices(epoch, step)
        if self.augment is None:
            return self.images.batch(indices)
        return self.images.batch(indices, self.augment, self.draws(epoch)[indices])

    def draws(self, epoch: int) -> NDArray[np.uint64]:
        """uint64[samples]: the random number that crops and mirrors each of them in an epoch."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, epoch_draws(len(self.images), self.shards.seed, epoch, AUGMENTATION))
        return self._drawn[1]

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from first_step on: 0 for all of it, another to resume in its middle."""
        return (self.batch(epoch, step) for step in range(first_step, self.steps_per_epoch))


class EvaluationLoader:
    """One rank's part of a test split in order, every sample once over all ranks.

    Ranks may have unequal numbers of samples and batches, or none; sum what was counted, never average
    averages.

    Args:
        images: the test split.
        batch_size: samples per batch at most; no effect on what is measured.
        rank, size: this rank and the number of ranks.

    Raises:
        ValueError: an argument out of bounds.
    """

    def __init__(self, images: ImageSet, *, batch_size: int, rank: int, size: int) -> None:
        check_rank(rank, size)
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} is not at least 1")
        self.images = images
        self.batch_size = batch_size
        self.rank = rank
        self.size = size

    @property
    def count(self) -> int:
        return len(evaluation_shard(len(self.images), rank=self.rank, size=self.size))

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.images)
        for indices in evaluation_batches(count, batch_size=self.batch_size, rank=self.rank, size=self.size):
            yield self.images.batch(indices)
