"""Files that outlive a machine that fails: what was written is brought to the disk before it counts."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_of(path: Path) -> Path:
    """Where a file is built before it replaces the one at `path`; what a killed job left there, the next one overwrites."""
    return path.with_name(f".{path.name}.part")


def is_special(path: Path) -> bool:
    """Whether a directory, a device, a pipe or a socket is at `path`: nothing that a file may replace."""
    return path.exists() and not path.is_file()


def put_in_place(path: Path) -> None:
    """Let the draft replace the file: whatever happens, one of the two is there and whole.

    Raises:
        OSError: what is at `path` is not a regular file, or the disk is full or broken.
    """
    if is_special(path):
        raise OSError(f"{path} is not a regular file")
    draft = draft_of(path)
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)
