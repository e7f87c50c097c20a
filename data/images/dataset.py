"""Labelled images in memory or in a memory map, what standardises them, and how they are augmented."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from data import DataError


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


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one split with their labels and what standardises them.

    Args:
        images: uint8[count, channels, height, width]; may be a read-only memory map.
        labels: int64[count], each in [0, len(classes)).
        mean: per channel, of pixels scaled to [0, 1]; of the training split, also in a test set.
        std: per channel, positive, in the same unit.
        classes: names, in the order of the labels.
        name: of the data set.
        source: where the pixels came from, in words for a run's record.

    Raises:
        DataError: arrays, labels, mean or std that do not fit this description.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or 0 in self.images.shape[1:]:
            shape = f"{self.images.dtype}{list(self.images.shape)}"
            raise DataError(f"images {shape} are not uint8[count, channels, height, width]")
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            shape = f"{self.labels.dtype}{list(self.labels.shape)}"
            raise DataError(f"labels {shape} are not int64[{len(self.images)}], one for each image")
        check_labels(self.labels, len(self.classes), self.name or "images")
        channels = self.images.shape[1]
        if len(self.mean) != channels or not np.all(np.isfinite(self.mean)):
            raise DataError(f"mean {self.mean} is not one finite number for each of {channels} channels")
        if len(self.std) != channels or not np.all(np.isfinite(self.std)) or min(self.std) <= 0:
            raise DataError(f"std {self.std} is not one positive number for each of {channels} channels")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def standardisation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[channels, 1, 1] each: what pixels are multiplied with, and what is added then."""
        scale = torch.tensor([1 / (255 * std) for std in self.std], dtype=torch.float32)
        shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)])
        return scale[:, None, None], shift[:, None, None]


def check_labels(labels: NDArray[np.integer], classes: int, where: str) -> None:
    """Raises DataError, which begins with `where`: a label is not in [0, classes), or classes < 1."""
    if classes < 1:
        raise DataError(f"{where}: {classes} classes, not at least 1")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        first = wrong[0]
        raise DataError(f"{where}: label {labels[first]} of record {first} is not in [0, {classes - 1}]")


def channel_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images, or of an HDF5 data set of them, with pixels scaled to [0, 1].

    The deviation of a constant channel is given as one grey level: it is a divisor.
    """
    total = np.zeros(images.shape[1], np.int64)
    squares = np.zeros(images.shape[1], np.int64)
    for start in range(0, len(images), 500):
        block = images[start : start + 500].astype(np.int64)
        total += block.sum(axis=(0, 2, 3))
        squares += np.square(block, out=block).sum(axis=(0, 2, 3))
    pixels = images.shape[0] * images.shape[2] * images.shape[3]
    mean = total / pixels
    # Rounding may leave a constant channel slightly below zero.
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 0.0))
    return tuple((mean / 255).tolist()), tuple((np.where(std > 0, std, 1.0) / 255).tolist())
