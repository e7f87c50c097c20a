"""Batches of images as torch tensors, sharded by rank."""

from collections.abc import Iterator

import torch

from data.batches import EpochLoader
from data.images.dataset import Augment, ImageSet
from data.sharding import AUGMENTATION, ShardedBatches, evaluation_batches, evaluation_shard

Batch = tuple[torch.Tensor, torch.Tensor]


class TrainingLoader(EpochLoader[Batch]):
    """One rank's training batches, shuffled and augmented anew in every epoch.

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
        shards = ShardedBatches(len(images), batch_size=batch_size, rank=rank, size=size, seed=seed)
        super().__init__(shards, AUGMENTATION)
        if augment is not None and augment.crop > min(images.shape[1:]) // 2:
            raise ValueError(
                f"crop {augment.crop} is not in [0, {min(images.shape[1:]) // 2}], half the image"
            )
        self.images = images
        self.augment = augment

    def batch(self, epoch: int, step: int) -> Batch:
        """float32[batch_size, channels, height, width], standardised, and int64[batch_size], the labels."""
        indices = self.shards.indices(epoch, step)
        if self.augment is None:
            return self.images.batch(indices)
        return self.images.batch(indices, self.augment, self.draws(epoch)[indices])


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
        self.images, self.batch_size = images, batch_size
        self.shard = evaluation_shard(len(images), rank=rank, size=size)
        self._batches = list(evaluation_batches(len(images), batch_size=batch_size, rank=rank, size=size))

    def __iter__(self) -> Iterator[Batch]:
        return (self.images.batch(indices) for indices in self._batches)
