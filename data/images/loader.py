"""Batches of images as torch tensors on any device, sharded by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import AUGMENTATION, Draws, Samples, Source
from data.images.file import ImageSet

BLOCK = 4096
"""Samples that are cut together on a GPU: all batches among them share the launches."""


@dataclass(frozen=True)
class Augment:
    """Random crop and horizontal flip of training images.

    Args:
        crop: pixels of black added on every side before a window of the original size is cut at random; 0
            cuts none.
        flip: mirror every second image, left to right. Not for digits: a mirrored digit is no digit.
    """

    crop: int = 4
    flip: bool = True

    def places(self, draws: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Window and mirroring of each random number.

        Args:
            draws: uint64[batch], uniform. Bits 0-30 place the window vertically, 31-61 horizontally; bit 63 flips.

        Returns:
            int64[3, batch]: top and left of the window, from the top left corner of the padding; 1 for mirrored.
        """
        span, bits, mask = np.uint64(2 * self.crop + 1), np.uint64(31), np.uint64(2**31 - 1)
        places = np.zeros((3, len(draws)), np.int64)
        places[0] = (draws & mask) % span
        places[1] = (draws >> bits & mask) % span
        if self.flip:
            places[2] = draws >> np.uint64(63)
        return places


class Batch(NamedTuple):
    """Some images.

    Attributes:
        images: float32[batch, channels, height, width], of mean 0 and variance 1 per channel over the training split.
        labels: int64[batch].
    """

    images: torch.Tensor
    labels: torch.Tensor


class Pixels(Source[Batch]):
    """A split, from which standardised batches are cut: on the host mapped, on a GPU resident as uint8.

    Args:
        images: the split.
        augment: crop and flip, where samples get random numbers; None for neither.

    Raises:
        ValueError: a crop of more than half the image.
    """

    def __init__(self, images: ImageSet, augment: Augment | None = None) -> None:
        super().__init__(len(images), f"{len(images)} images of {images.images.nbytes / 1e9:.1f} GB")
        if augment is not None and augment.crop > min(images.shape[1:]) // 2:
            raise ValueError(
                f"crop {augment.crop} is not in [0, {min(images.shape[1:]) // 2}], half the image"
            )
        self.stream = AUGMENTATION if augment else None
        self._augment = augment
        self._pixels = torch.from_numpy(images.images)
        self._labels = torch.from_numpy(images.labels)
        # float32[channels, 1, 1] each: what pixels are multiplied with, and what is added then
        scale = [1 / (255 * std) for std in images.std]
        shift = [-m / s for m, s in zip(images.mean, images.std, strict=True)]
        self._scale, self._shift = (torch.tensor(each)[:, None, None] for each in (scale, shift))
        self._channels, self._rows, self._columns = map(torch.arange, images.shape)

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.block = 1 if device.type == "cpu" else BLOCK

    def cut(self, samples: Samples, draws: Draws = None) -> Batch:
        places = () if draws is None or self._augment is None else self._augment.places(draws)
        plan = self.placed(np.vstack([samples, *places]))
        pixels = self._augmented(*plan[:, :, None]) if len(plan) > 1 else self._pixels[plan[0]]
        images = pixels.to(torch.float32).mul_(self._scale).add_(self._shift)
        return Batch(images, self._labels[plan[0]])

    def _augmented(self, *plan: torch.Tensor) -> torch.Tensor:
        """uint8[batch, channels, height, width], black beyond an image; plan: int64[batch, 1] each, samples and `places`."""
        samples, top, left, mirrored = plan
        crop = self._augment.crop if self._augment else 0
        rows = top - crop + self._rows
        columns = left - crop + torch.where(mirrored > 0, self._columns.flip(0), self._columns)
        inside = [(at >= 0) & (at < len(all)) for at, all in ((rows, self._rows), (columns, self._columns))]
        pixels = self._pixels[
            samples[:, :, None, None],
            self._channels[:, None, None],
            rows.clamp(0, len(self._rows) - 1)[:, None, :, None],
            columns.clamp(0, len(self._columns) - 1)[:, None, None, :],
        ]
        return pixels.mul_(inside[0][:, None, :, None] & inside[1][:, None, None, :])
