"""What all prepared HDF5 files share: atomic creation, checksums, memory maps."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.durable import replaced

Split = TypeVar("Split")
SPLITS = ("train", "test")
WRITE_IT = "; write the file with python -m data.prepare"
"""What is advised where a file is of another kind."""
_BLOCK = 1 << 22  # bytes that a checksum reads at once


@dataclass(frozen=True)
class Layout:
    """Layout of a kind of data set: a group of columns per split, with their checksum.

    Attributes:
        what: it holds, in a word.
        format, version: attributes of the file.
        columns: name -> little-endian type, in the order of the checksum.
    """

    what: str
    format: str
    version: int
    columns: Mapping[str, str]

    @contextmanager
    def created(self, path: Path, counts: Mapping[str, int], **attributes: Any) -> Iterator[h5py.File]:
        """A new file, filled within the block; it replaces `path` when the block ends, and is removed on an error.

        Args:
            path: of the file.
            counts: samples of each split.
            attributes: of the file.

        Raises:
            DataError: no such directory; a split without samples.
        """
        if not path.parent.is_dir():
            raise DataError(f"{path.parent}: no such directory")
        for split in SPLITS:
            if counts[split] < 1:
                raise DataError(f"{path}: {counts[split]} samples in split {split!r}, not at least 1")
        with replaced(path) as draft, h5py.File(draft, "w") as file:
            file.attrs.update(format=self.format, version=self.version, **attributes)
            yield file
            for split in SPLITS:
                file[split].attrs["crc32"] = self._checksum(file[split])

    @contextmanager
    def opened(self, path: Path) -> Iterator[h5py.File]:
        """The file, open for reading; whatever HDF5 finds wrong with it becomes a DataError that names it."""
        if not path.is_file():
            raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        try:
            # A prepared file never changes in place, and some cluster file systems have no locks.
            with h5py.File(path, "r", locking=False) as file:
                found = file.attrs.get("format")
                if not isinstance(found, str) or found != self.format:
                    raise DataError(f"{path}: format {found!r} is not {self.format!r}{WRITE_IT}")
                if (found := file.attrs.get("version")) != self.version:
                    raise DataError(
                        f"{path}: version {found} of the layout is not {self.version}; prepare the file again"
                    )
                yield file
        except DataError:
            raise
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: not a whole HDF5 file of {self.what}: {error}") from error

    def read(
        self, file: h5py.File, path: Path, read: Callable[[h5py.Group], Split], *, verify: bool
    ) -> tuple[Split, Split]:
        """The training and the test split.

        Args:
            file: as `opened` gives it.
            path: of the file.
            read: group -> split; its DataErrors need not name the file.
            verify: compare checksums first.
        """
        splits = []
        for split in SPLITS:
            group = file[split]
            if verify and (found := self._checksum(group)) != (written := int(group.attrs["crc32"])):
                raise DataError(
                    f"{path}: checksum {found:08x} of split {split!r} is not {written:08x}: bytes were changed"
                )
            try:
                splits.append(read(group))
            except DataError as error:
                raise DataError(f"{path}, split {split!r}: {error}") from error
        return splits[0], splits[1]

    def _checksum(self, group: h5py.Group) -> int:
        """CRC-32 of the bytes of all columns, one after the other."""
        checksum = 0
        for name, kind in self.columns.items():
            column = group[name]
            rows = max(1, _BLOCK * len(column) // max(1, column.nbytes))
            for start in range(0, len(column), rows):
                block = np.ascontiguousarray(column[start : start + rows].astype(kind))
                checksum = zlib.crc32(block.data, checksum)
        return checksum


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


def already_there(
    output: Path,
    opened: Callable[..., tuple[Any, Any]],
    description: Callable[[Any, Any], str],
    wanted: Mapping[str, object],
) -> str:
    """Keep an output that is there.

    Args:
        output: HDF5 file to be written, which exists.
        opened: (path, verify=) -> its splits.
        description: splits -> in words.
        wanted: attributes of the splits to be written.

    Returns:
        A line that says so, where it has them and is whole, checksums included.

    Raises:
        DataError: it is another one, or damaged.
    """
    try:
        splits = opened(output, verify=True)
    except DataError as error:
        advice = "; --force replaces it" if output.is_file() else ""
        raise DataError(f"{str(error).removesuffix(WRITE_IT)}{advice}") from error
    found = f"{description(*splits)} ({splits[0].source})"
    if any(getattr(splits[0], name) != value for name, value in wanted.items()):
        raise DataError(f"{output}: exists and holds {found}; --force replaces it")
    return f"{output}: already there, {found}"
