"""Reads CIFAR-10's official binary layout.

A batch file is a row of records, each of one label byte and 3072 pixel bytes: 32x32 red, then green, then
blue. The Python version is pickled and never read.
Source: https://www.cs.toronto.edu/~kriz/cifar.html, "binary version".
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.images.dataset import ImageSet, check_labels
from data.images.file import open_image_file

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
BATCH_RECORDS = 10_000
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)


@dataclass(frozen=True)
class BatchFile:
    """A batch file and its place in the image set.

    Args:
        name: as in the official layout.
        where: directory or archive and name, for messages.
        split: "train" or "test".
        start: position of its first record in that split.
    """

    name: str
    where: str
    split: str
    start: int


def open_cifar10(path: str | Path) -> tuple[ImageSet, ImageSet]:
    """Open the file that `python -m data.prepare cifar10` wrote: the training and the test split.

    Raises:
        DataError: no such file, truncated, of another layout, or another data set.
    """
    train, test = open_image_file(path)
    if train.name != "cifar10" or train.shape != SHAPE or train.classes != CLASSES:
        raise DataError(
            f"{path}: holds {train.name!r}, images of shape {train.shape}, not 'cifar10' of {SHAPE}"
        )
    return train, test


def find_batches(source: Path) -> tuple[BatchFile, ...]:
    """The batch files of a directory or archive in official order, judged by names and sizes.

    Args:
        source: a directory with the six .bin files (or with a folder cifar-10-batches-bin of them), or an
            archive of them, such as the official .tar.gz.

    Raises:
        DataError: no such source, nothing in it, a file missing, of another size, or (in an archive) there
            twice; an archive that is damaged or cut.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or directory")
    within = f"{binary_folder(source)}/" if source.is_dir() else f"{source}:"
    where = {name: within + name for name in FILES}
    sizes: dict[str, int] = {}
    for name, size, _ in _contents(source):
        if name in sizes:
            raise DataError(f"{source}: {name} is there more than once")
        sizes[name] = size
    if not sizes:
        raise DataError(f"{source}: none of {', '.join(FILES)} found{pickle_hint(source)}")
    if missing := [name for name in FILES if name not in sizes]:
        raise DataError(f"{source}: {', '.join(missing)} missing of the {len(FILES)} files of CIFAR-10")
    for name, size in sizes.items():
        if size != BATCH_RECORDS * RECORD_BYTES:
            raise DataError(
                f"{where[name]}: {size} bytes are not the {BATCH_RECORDS * RECORD_BYTES} of {BATCH_RECORDS} records"
            )
    train = [
        BatchFile(name, where[name], "train", number * BATCH_RECORDS)
        for number, name in enumerate(TRAIN_FILES)
    ]
    return (*train, BatchFile(TEST_FILE, where[TEST_FILE], "test", 0))


def read_batches(
    source: Path, batches: tuple[BatchFile, ...]
) -> Iterator[tuple[BatchFile, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Read batch files, one in memory at a time, in the order in which they lie there.

    Returns:
        An iterator over (batch, images uint8[records, 3, 32, 32], labels uint8[records]).

    Raises:
        DataError: a file shorter than its size was, an archive that is damaged, or a label above 9.
    """
    wanted = {batch.name: batch for batch in batches}
    for name, _, read in _contents(source):
        if name not in wanted:
            continue
        batch = wanted[name]
        expected = BATCH_RECORDS * RECORD_BYTES
        content = read(expected + 1)
        if len(content) != expected:
            raise DataError(f"{batch.where}: {len(content)} bytes were read, not {expected}")
        records = np.frombuffer(content, np.uint8).reshape(BATCH_RECORDS, RECORD_BYTES)
        check_labels(records[:, 0], len(CLASSES), batch.where)
        yield batch, records[:, 1:].reshape(-1, *SHAPE), records[:, 0]


def _contents(source: Path) -> Iterator[tuple[str, int, Callable[[int], bytes]]]:
    """Name, size in bytes, and a function that reads so many of them, of each batch file, in the order in which they lie there.

    An archive is read in place: nothing is extracted, and going back would decompress it again.
    """
    if source.is_dir():
        for path in (binary_folder(source) / name for name in FILES):
            if path.is_file():
                yield path.name, path.stat().st_size, partial(_read, path)
        return
    try:
        with tarfile.open(source, "r:*") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name in FILES and member.isfile() and (stream := tar.extractfile(member)) is not None:
                    yield name, member.size, stream.read
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{source}: not a whole tar archive: {error}") from error


def _read(path: Path, most: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(most)


def binary_folder(source: Path) -> Path:
    """The folder of the batch files: source, or the one that unpacking the archive in source makes."""
    inner = source / "cifar-10-batches-bin"
    return inner if inner.is_dir() and not any((source / name).is_file() for name in FILES) else source


def pickle_hint(source: Path) -> str:
    """A closing remark for whoever has the wrong one of the three official archives."""
    if source.is_dir() and any(source.rglob("data_batch_1*")):
        return "; this looks like the Python or MATLAB version, take the binary one"
    return "; the directory is empty" if source.is_dir() and not any(source.iterdir()) else ""
