"""The one HDF5 layout of all image sets: written whole or not at all, mapped into memory by its readers.

/               attributes: format, version, name, source, classes str[], mean float64[C], std float64[C]
/train, /test   attribute: crc32, of the images' bytes followed by the labels'
    images      uint8[N, C, H, W], contiguous
    labels      int64[N]
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.images.dataset import ImageSet, channel_statistics, check_labels
from data.prepared_file import SPLITS, check_sum, created, mapped, opened

FORMAT, VERSION = "oktopk-images", 1
BLOCK = 1000


class ImageFileWriter:
    """Writes an image set beside its place and renames it there when it is whole.

    Used as a context manager: `put` every sample of both splits, in any order, before the end of the block.
    An exception in the block leaves the place as it was.

    Args:
        path: of the file; its directory must exist. A file there is replaced.
        name: of the data set.
        classes: names, in the order of the labels.
        source: where the pixels come from, in words.
        shape: channels, height and width.
        counts: samples of "train" and of "test", each at least 1.

    Raises:
        DataError: no such directory; a split without samples.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        classes: tuple[str, ...],
        source: str,
        shape: tuple[int, int, int],
        counts: Mapping[str, int],
    ) -> None:
        if not path.parent.is_dir():
            raise DataError(f"{path.parent}: no such directory")
        for split in SPLITS:
            if counts[split] < 1:
                raise DataError(f"{path}: {counts[split]} samples in split {split!r}, not at least 1")
        self.path = path
        self.classes = classes
        self._missing = dict(counts)
        self._writing = self._written(shape, counts, name=name, source=source, classes=list(classes))

    @contextmanager
    def _written(
        self, shape: tuple[int, int, int], counts: Mapping[str, int], **attributes: Any
    ) -> Iterator[h5py.File]:
        with created(self.path, format=FORMAT, version=VERSION, **attributes) as file:
            for split in SPLITS:
                file.create_dataset(f"{split}/images", (counts[split], *shape), np.uint8)
                file.create_dataset(f"{split}/labels", (counts[split],), np.int64)
            yield file
            self._finish(file)

    def put(self, split: str, start: int, images: NDArray[np.uint8], labels: NDArray[np.integer]) -> None:
        """Write some samples, each position once.

        Args:
            split: "train" or "test".
            start: position of the first one.
            images: uint8[count, channels, height, width].
            labels: integers[count].

        Raises:
            DataError: a label that is not in [0, classes).
        """
        check_labels(labels, len(self.classes), f"{self.path} ({split}, from sample {start})")
        stop = start + len(images)
        self._file[f"{split}/images"][start:stop] = images
        self._file[f"{split}/labels"][start:stop] = labels
        self._missing[split] -= len(images)

    def __enter__(self) -> "ImageFileWriter":
        self._file = self._writing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.__exit__(kind, error, trace)

    def _finish(self, file: h5py.File) -> None:
        for split in SPLITS:
            if self._missing[split]:
                raise DataError(
                    f"{self.path}: {self._missing[split]} samples of split {split!r} were never written"
                )
            file[split].attrs["crc32"] = split_checksum(file[split])
        mean, std = channel_statistics(file["train/images"])
        file.attrs.update({"mean": mean, "std": std})


def open_image_file(path: str | Path, *, verify: bool = False) -> tuple[ImageSet, ImageSet]:
    """Open an image set that data.prepare wrote.

    The images are mapped, not read: the ranks of one host share one copy, in the page cache.

    Args:
        path: of the HDF5 file.
        verify: read everything and compare checksums; else only what is small is checked.

    Returns:
        The training and the test split.

    Raises:
        DataError: no such file, truncated, not HDF5, of another layout, contents that do not fit it, or (with
            verify) changed bytes.
    """
    path = Path(path)
    with opened(path, "images", FORMAT, VERSION) as file:
        train, test = (read_split(file, path, split, verify) for split in SPLITS)
    if train.shape != test.shape:
        raise DataError(
            f"{path}: test images of shape {test.shape} are not of {train.shape} as the training images"
        )
    return train, test


def read_split(file: h5py.File, path: Path, split: str, verify: bool) -> ImageSet:
    """One split of an open file; see open_image_file."""
    group = file[split]
    if verify:
        check_sum(group, split_checksum(group))
    try:
        return ImageSet(
            images=mapped(group["images"]),
            labels=group["labels"][:].astype(np.int64, casting="safe"),
            mean=tuple(float(value) for value in file.attrs["mean"]),
            std=tuple(float(value) for value in file.attrs["std"]),
            classes=tuple(str(name) for name in file.attrs["classes"]),
            name=str(file.attrs["name"]),
            source=str(file.attrs["source"]),
        )
    except DataError as error:
        raise DataError(f"{path}, split {split!r}: {error}") from error


def split_checksum(group: h5py.Group) -> int:
    """CRC-32 of a split: all images' bytes, then all labels' as little-endian int64."""
    checksum = 0
    for start in range(0, len(group["images"]), BLOCK):
        checksum = zlib.crc32(group["images"][start : start + BLOCK], checksum)
    return zlib.crc32(group["labels"][:].astype("<i8"), checksum)
