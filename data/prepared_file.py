"""What all prepared HDF5 files share: created whole or not at all, checked when opened, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.durable import replaced

SPLITS = ("train", "test")


@contextmanager
def created(path: Path, **attributes: Any) -> Iterator[h5py.File]:
    """A new file with these attributes, beside `path`; it replaces `path` when the block ends, and is removed on an error."""
    with replaced(path) as draft, h5py.File(draft, "w") as file:
        file.attrs.update(attributes)
        yield file


@contextmanager
def opened(path: Path, what: str, layout: str, version: int) -> Iterator[h5py.File]:
    """The file, open for reading; whatever HDF5 finds wrong with it becomes a DataError that names it.

    Args:
        path: of the file.
        what: it holds, in a word.
        layout, version: its attributes "format" and "version".
    """
    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        # A prepared file never changes in place, and some cluster file systems have no locks.
        with h5py.File(path, "r", locking=False) as file:
            found = file.attrs.get("format")
            if not isinstance(found, str) or found != layout:
                raise DataError(
                    f"{path}: format {found!r} is not {layout!r}; write the file with python -m data.prepare"
                )
            if (found := file.attrs.get("version")) != version:
                raise DataError(
                    f"{path}: version {found} of the layout is not {version}; prepare the file again"
                )
            yield file
    except DataError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: not a whole HDF5 file of {what}: {error}") from error


def check_sum(group: h5py.Group, found: int) -> None:
    """Raises DataError: a split's attribute "crc32" is not the checksum that was found."""
    written = int(group.attrs["crc32"])
    if written != found:
        split = group.name.removeprefix("/")
        raise DataError(
            f"{group.file.filename}: checksum {found:08x} of split {split!r} is not {written:08x}: bytes were changed"
        )


def mapped(column: h5py.Dataset, mode: Literal["r", "c"] = "r") -> NDArray[Any]:
    """A column mapped into memory ("c": copied where written), read where HDF5 does not store it in one piece."""
    offset = column.id.get_offset()
    if offset is None or column.file.userblock_size:
        return np.asarray(column[:])
    return np.asarray(np.memmap(column.file.filename, column.dtype, mode, offset, column.shape))


def data_checksum(path: str | Path) -> str:
    """The CRC-32 of the training and of the held-out split, "0123abcd-89abcdef", as the file says; nothing else is read.

    Returns:
        "" where there is no file that data.prepare wrote, or a damaged one.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            return "-".join(f"{int(file[split].attrs['crc32']):08x}" for split in SPLITS)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError):
        return ""
