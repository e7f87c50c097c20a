"""HDF5 layout of image sets: written atomically, read through a memory map.

/               attributes: format, version, name, source, classes str[], mean float64[C], std float64[C]
/train, /test   attribute: crc32, of the images' bytes followed by the labels'
    images      uint8[N, C, H, W], contiguous
    labels      int64[N]
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.images.dataset import ImageSet, channel_statistics, check_labels
from data.prepared_file import SPLITS, Layout, mapped

LAYOUT = Layout("images", "oktopk-images", 1, {"images": "|u1", "labels": "<i8"})


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
        DataError: no such directory; a split without samples, or with fewer than said; a label out of range. The place is then
            as it was.
    """
    missing = dict(counts)
    with LAYOUT.created(path, counts, name=name, source=source, classes=list(classes)) as file:
        for split in SPLITS:
            file.create_dataset(f"{split}/images", (counts[split], *shape), np.uint8)
            file.create_dataset(f"{split}/labels", (counts[split],), np.int64)
        for split, start, images, labels in parts:
            check_labels(labels, len(classes), f"{path} ({split}, from sample {start})")
            file[f"{split}/images"][start : start + len(images)] = images
            file[f"{split}/labels"][start : start + len(images)] = labels
            missing[split] -= len(images)
        for split in SPLITS:
            if missing[split]:
                raise DataError(f"{path}: {missing[split]} samples of split {split!r} were never written")
        mean, std = channel_statistics(file["train/images"])
        file.attrs.update({"mean": mean, "std": std})


def open_image_file(path: str | Path, *, verify: bool = False) -> tuple[ImageSet, ImageSet]:
    """Open an image set that data.prepare wrote: the training and the test split.

    The images are mapped, not read: the ranks of one host share one copy, in the page cache.

    Args:
        path: of the HDF5 file.
        verify: read everything and compare checksums; else only what is small is checked.

    Raises:
        DataError: no such file, truncated, of another layout, contents that do not fit it, or (with verify) changed bytes.
    """
    path = Path(path)

    def read(group: h5py.Group) -> ImageSet:
        attributes = group.file.attrs
        return ImageSet(
            images=mapped(
                group["images"], "c"
            ),  # torch wants what it wraps to be writable, and the file stays as it is
            labels=group["labels"][:].astype(np.int64, casting="safe"),
            mean=tuple(float(value) for value in attributes["mean"]),
            std=tuple(float(value) for value in attributes["std"]),
            classes=tuple(str(name) for name in attributes["classes"]),
            name=str(attributes["name"]),
            source=str(attributes["source"]),
        )

    with LAYOUT.opened(path) as file:
        train, test = LAYOUT.read(file, path, read, verify=verify)
    if train.shape != test.shape:
        raise DataError(
            f"{path}: test images of shape {test.shape} are not of {train.shape} as the training images"
        )
    return train, test
