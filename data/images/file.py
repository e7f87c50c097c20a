"""Labelled images, and their HDF5 layout: written atomically, read through a memory map.

/               attributes: format, version, name, source, classes str[], mean float64[C], std float64[C]
/train, /test   attribute: crc32, of the images' bytes followed by the labels'
    images      uint8[N, C, H, W], contiguous
    labels      int64[N]
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.prepared_file import Layout, Part

LAYOUT = Layout("images", "oktopk-images", 1, {"images": "|u1", "labels": "<i8"})


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


def write_image_file(
    path: Path,
    parts: Iterable[tuple[str, int, NDArray[np.uint8], NDArray[np.integer]]],
    *,
    name: str,
    classes: tuple[str, ...],
    source: str,
    shape: tuple[int, int, int],
    counts: Mapping[str, int],
) -> None:
    """Write an image set beside its place and rename it there when it is whole.

    Args:
        path: of the file; its directory must exist. A file there is replaced.
        parts: (split, position of the first sample, images, labels), every sample of both splits once, in any order.
        name: of the data set.
        classes: names, in the order of the labels.
        source: where the pixels come from, in words.
        shape: channels, height and width.
        counts: samples of "train" and of "test", each at least 1.

    Raises:
        DataError: no such directory; a split without samples, or with fewer than said; a label out of range. The place is
            then as it was.
    """
    shapes = {split: {"images": (count, *shape), "labels": (count,)} for split, count in counts.items()}

    def checked() -> Iterator[Part]:
        for split, start, images, labels in parts:
            check_labels(labels, len(classes), f"{path} ({split}, from sample {start})")
            yield split, start, {"images": images, "labels": labels}

    with LAYOUT.created(path, shapes, name=name, source=source, classes=list(classes)) as file:
        LAYOUT.fill(file, checked())
        mean, std = channel_statistics(file["train/images"])
        file.attrs.update({"mean": mean, "std": std})


def open_image_file(path: str | Path) -> tuple[ImageSet, ImageSet]:
    """Open an image set that data.prepare wrote: the training and the test split.

    Raises:
        DataError: no such file, truncated, of another layout, or contents that do not fit it.
    """

    def build(group: h5py.Group, columns: dict[str, Any]) -> ImageSet:
        attributes = group.file.attrs
        mean, std = (tuple(map(float, attributes[name])) for name in ("mean", "std"))
        classes = tuple(map(str, attributes["classes"]))
        return ImageSet(**columns, mean=mean, std=std, classes=classes)

    train, test = LAYOUT.read(Path(path), build)
    if train.shape != test.shape:
        raise DataError(
            f"{path}: test images of shape {test.shape} are not of {train.shape} as the training images"
        )
    return train, test
