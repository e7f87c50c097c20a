"""What all prepared HDF5 files share: atomic creation, checksums, memory maps."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.durable import replaced

Split = TypeVar("Split")
SPLITS = ("train", "test")
_BLOCK = 1 << 22  # bytes that a checksum reads at once

Build = Callable[[h5py.Group, dict[str, Any]], Split]
Part = tuple[str, int | None, Mapping[str, NDArray[Any]]]
"""Split, position of the first row, None behind what came before, and rows of some columns."""


@dataclass(frozen=True)
class Layout:
    """Layout of a kind of data set: a group of columns per split, with their checksum.

    Attributes:
        what: it holds, in a word.
        format, version: attributes of the file.
        columns: name -> little-endian type, in the order of the checksum; the first one is the large one, which readers map.
    """

    what: str
    format: str
    version: int
    columns: Mapping[str, str]

    @contextmanager
    def created(
        self, path: Path, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], **attributes: Any
    ) -> Iterator[h5py.File]:
        """A new file, filled within the block; it replaces `path` when the block ends, and is removed on an error.

        Args:
            path: of the file.
            shapes: split -> column -> shape.
            attributes: of the file.

        Raises:
            DataError: no such directory; a split without samples.
        """
        if not path.parent.is_dir():
            raise DataError(f"{path.parent}: no such directory")
        for split in SPLITS:
            if (count := min(shape[0] for shape in shapes[split].values())) < 1:
                raise DataError(f"{path}: {count} samples in split {split!r}, not at least 1")
        with replaced(path) as draft, h5py.File(draft, "w") as file:
            file.attrs.update(format=self.format, version=self.version, **attributes)
            for split in SPLITS:
                for name, shape in shapes[split].items():
                    file.create_dataset(f"{split}/{name}", shape, self.columns[name])
            yield file
            for split in SPLITS:
                file[split].attrs["crc32"] = self._checksum(file[split])

    def fill(self, file: h5py.File, parts: Iterable[Part]) -> None:
        """Write all rows of a file that was created. Raises DataError: some are missing."""
        done: Counter[tuple[str, str]] = Counter()
        for split, start, columns in parts:
            for name, rows in columns.items():
                first = done[split, name] if start is None else start
                file[split][name][first : first + len(rows)] = rows
                done[split, name] += len(rows)
        for split in SPLITS:
            for name in self.columns:
                if missing := len(file[split][name]) - done[split, name]:
                    raise DataError(f"{missing} {name} of split {split!r} were never written")

    def read(self, path: Path, build: Build[Split]) -> tuple[Split, Split]:
        """The training and the test split. The large column is mapped, not read: the ranks of one host share the page cache.

        Args:
            path: of the file.
            build: group, its columns and the file's `name` and `source` -> split; its DataErrors need not name the file.

        Raises:
            DataError: no such file, or whatever is wrong with it; the message names it.
        """
        if not path.is_file():
            raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        try:
            # A prepared file never changes in place, and some cluster file systems have no locks.
            with h5py.File(path, "r", locking=False) as file:
                for name, wanted in (("format", self.format), ("version", self.version)):
                    written = file.attrs.get(name)
                    if str(written) != str(wanted):
                        raise DataError(
                            f"{name} {written} is not {wanted}; write the file with python -m data.prepare"
                        )
                train, test = (self._built(file[split], build) for split in SPLITS)
                return train, test
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: not a whole HDF5 file of {self.what}: {error}") from error

    def _built(self, group: h5py.Group, build: Build[Split]) -> Split:
        large, *others = self.columns
        columns = {large: _mapped(group[large]), **{name: group[name][:] for name in others}}
        try:
            for name, kind in self.columns.items():
                if columns[name].dtype != kind:
                    raise DataError(f"{name} are {columns[name].dtype}, not {np.dtype(kind)}")
            named = {name: str(group.file.attrs[name]) for name in ("name", "source")}
            return build(group, {**columns, **named})
        except DataError as error:
            raise DataError(f"split {group.name.strip('/')!r}: {error}") from error

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


def _mapped(column: h5py.Dataset) -> NDArray[Any]:
    """A column mapped into memory and copied where it is written, as torch wants it; read if HDF5 stores it in pieces."""
    offset = column.id.get_offset()
    if offset is None or column.file.userblock_size:
        return np.asarray(column[:])
    return np.asarray(np.memmap(column.file.filename, column.dtype, "c", offset, column.shape))


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
