"""Batches of images as torch tensors on any device, sharded by rank."""

from __future__ import annotations

from typing import Self, Unpack

import numpy as np
import torch

from data.batches import BlockLoader, HeldOut, HeldOutPlace, Place, Resident
from data.images.dataset import Augment, ImageSet
from data.sharding import AUGMENTATION, ShardedBatches, evaluation_batches, evaluation_shard

Batch = tuple[torch.Tensor, torch.Tensor]

BLOCK = 4096
"""Samples that are cut together on a GPU: all batches among them share the launches."""


class Pixels(Resident):
    """A split, from which standardised batches are cut: on the host mapped, on a GPU resident as uint8.

    Args:
        images: the split.
        crop: of the augmentation.
        within: which of its samples are needed.
    """

    def __init__(self, images: ImageSet, *, crop: int = 0, within: slice = slice(None)) -> None:
        pixels = images.images[within]
        super().__init__(f"{len(pixels)} images of {pixels.nbytes / 1e9:.1f} GB")
        self._crop = crop
        self._pixels = torch.from_numpy(pixels)
        self._labels = torch.from_numpy(images.labels[within])
        self._scale, self._shift = images.standardisation()
        self._channels, self._rows, self._columns = map(torch.arange, images.shape)

    def cut(self, plan: torch.Tensor) -> Batch:
        """Some of the samples, with their labels.

        Args:
            plan: int64[1, batch], samples counted within the needed ones; or int64[4, batch], followed by `Augment.places`.

        Returns:
            float32[batch, channels, height, width] of mean 0 and variance 1 per channel over the training split, and
            int64[batch]; on the device, free to be changed.
        """
        plan = plan.to(self.device)
        samples = plan[0]
        pixels = self._augmented(*plan[:, :, None]) if len(plan) > 1 else self._pixels[samples]
        images = pixels.to(torch.float32).mul_(self._scale).add_(self._shift)
        return images, self._labels[samples]

    def _augmented(self, *plan: torch.Tensor) -> torch.Tensor:
        """uint8[batch, channels, height, width], black beyond an image; plan: as `cut`, int64[batch, 1] each."""
        samples, top, left, mirrored = plan
        rows = top - self._crop + self._rows
        columns = left - self._crop + torch.where(mirrored > 0, self._columns.flip(0), self._columns)
        inside = [(at >= 0) & (at < len(all)) for at, all in ((rows, self._rows), (columns, self._columns))]
        pixels = self._pixels[
            samples[:, :, None, None],
            self._channels[:, None, None],
            rows.clamp(0, len(self._rows) - 1)[:, None, :, None],
            columns.clamp(0, len(self._columns) - 1)[:, None, None, :],
        ]
        return pixels.mul_(inside[0][:, None, :, None] & inside[1][:, None, None, :])


class TrainingLoader(BlockLoader[Batch]):
    """One rank's training batches, shuffled and augmented anew in every epoch.

    Args:
        images: the training split.
        augment: crop and flip; None for neither.
        place: of this rank.

    Raises:
        DataError: fewer samples than ranks, or than one step of all ranks needs.
        ValueError: a crop of more than half the image.
    """

    def __init__(self, images: ImageSet, *, augment: Augment | None = None, **place: Unpack[Place]) -> None:
        super().__init__(ShardedBatches(len(images), **place), AUGMENTATION)
        if augment is not None and augment.crop > min(images.shape[1:]) // 2:
            raise ValueError(
                f"crop {augment.crop} is not in [0, {min(images.shape[1:]) // 2}], half the image"
            )
        self._augment = augment
        self._pixels = Pixels(images, crop=augment.crop if augment else 0)
        self._begin(0)

    def to(self, device: torch.device) -> Self:
        self._pixels.to(device)
        self._begin(0 if device.type == "cpu" else BLOCK)
        return self

    def batch(self, epoch: int, step: int) -> Batch:
        """float32[batch_size, channels, height, width], standardised, and int64[batch_size], the labels."""
        images, labels = self._pieces(epoch, step)
        return images, labels

    def _plan(self, epoch: int) -> torch.Tensor:
        samples = self.shards.all_indices(epoch)
        places = self._augment.places(self.draws(epoch)[samples]) if self._augment else ()
        plan, device = torch.from_numpy(np.vstack([samples, *places])), self._pixels.device
        # from pageable memory the copy would wait for a GPU
        return plan.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan.to(device)

    def _cut(self, plan: torch.Tensor) -> Batch:
        return self._pixels.cut(plan)


class EvaluationLoader(HeldOut[Batch]):
    """One rank's part of a test split in order, every sample once over all ranks."""

    def __init__(self, images: ImageSet, **place: Unpack[HeldOutPlace]) -> None:
        shard = evaluation_shard(len(images), rank=place["rank"], size=place["size"])
        pixels = Pixels(images, within=slice(shard.start, shard.stop))
        batches = evaluation_batches(len(shard), batch_size=place["batch_size"], rank=0, size=1)
        super().__init__(pixels, pixels.cut, (torch.from_numpy(batch[None]) for batch in batches))
