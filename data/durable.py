"""Files that outlive a machine that fails: what was written is brought to the disk before it counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_of(path: Path) -> Path:
    """Where a file is built before it replaces the one at `path`; the next process overwrites what a killed one left there."""
    return path.with_name(f".{path.name}.part")


def is_special(path: Path) -> bool:
    """Whether a directory, a device, a pipe or a socket is at `path`: nothing that a file may replace."""
    return path.exists() and not path.is_file()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A draft to write within the block; at its end the draft replaces `path`, on an error it is removed.

    Whatever happens, a file at `path` is whole, the old one or the new one. The draft may still be open, as one that is
    written on afterwards is.

    Raises:
        OSError: what is at `path` is not a regular file, or the disk is full or broken.
    """
    if is_special(path):
        raise OSError(f"{path} is not a regular file")
    draft = draft_of(path)
    try:
        yield draft
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
