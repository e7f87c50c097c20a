"""Reads CIFAR-10's official binary layout.

A batch file is a row of records, each of one label byte and 3072 pixel bytes: 32x32 red, then green, then
blue. The Python version is pickled and never read.
Source: https://www.cs.toronto.edu/~kriz/cifar.html, "binary version".
"""

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.images.file import check_labels

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
BATCH_RECORDS = 10_000
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)


def read_batches(source: Path) -> Iterator[tuple[str, int, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Read the batch files of an archive or a folder, one in memory at a time, in the order in which they lie there.

    An archive is read in place: nothing is extracted, and going back would decompress it again.

    Args:
        source: the official .tar.gz or another archive of its six .bin files, their folder, or the one that it was unpacked in.

    Returns:
        An iterator over (split, position of the first record in it, images uint8[records, 3, 32, 32], labels uint8[records]).

    Raises:
        DataError: no such source, or an archive that is damaged or cut; a file missing, of another size, or there twice; a label
            above 9.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or folder: the archive is at {URL}")
    left = {name: ("train", number * BATCH_RECORDS) for number, name in enumerate(TRAIN_FILES)}
    left[TEST_FILE] = ("test", 0)
    expected = BATCH_RECORDS * RECORD_BYTES
    for name, size, content in _contents(source, expected):
        if name not in left:
            raise DataError(f"{source}: {name} is there more than once")
        split, start = left.pop(name)
        if size != expected or len(content) != expected:  # the second while it is being written
            raise DataError(
                f"{source}:{name}: {size} bytes are not the {expected} of {BATCH_RECORDS} records"
            )
        records = np.frombuffer(content, np.uint8).reshape(BATCH_RECORDS, RECORD_BYTES)
        check_labels(records[:, 0], len(CLASSES), f"{source}:{name}")
        yield split, start, records[:, 1:].reshape(-1, *SHAPE), records[:, 0]
    if left:
        raise DataError(
            f"{source}: {', '.join(left)} missing of the {len(FILES)} files of CIFAR-10, binary version ({URL})"
        )


def _contents(source: Path, most: int) -> Iterator[tuple[str, int, bytes]]:
    """Name, size and so many bytes at most of each batch file, in the order in which they lie there."""
    if source.is_dir():
        inner = source / "cifar-10-batches-bin"
        for path in ((inner if inner.is_dir() else source) / name for name in FILES):
            if path.is_file():
                yield path.name, path.stat().st_size, path.read_bytes()[:most]
        return
    try:
        with tarfile.open(source, "r:*") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name in FILES and member.isfile() and (stream := tar.extractfile(member)) is not None:
                    yield name, member.size, stream.read(most)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{source}: not a whole tar archive: {error}") from error
