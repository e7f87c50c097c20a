"""Writes files durably (fsync, atomic rename) and locks them for one writer."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data import DataError


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def draft_of(path: Path) -> Path:
    """Path of the draft that replaces `path`; a killed process leaves it, and the next one overwrites it."""
    return path.with_name(f".{path.name}.part")


def is_special(path: Path) -> bool:
    """Whether `path` is a directory, a device, a pipe or a socket, which no file may replace."""
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


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Hold the right to write `output` within it, by a hidden file beside it that is gone afterwards.

    Args:
        output: about to be written; need not exist.

    Raises:
        DataError: another process holds the right, or the folder does not exist.
        OSError: the folder cannot be written.
    """
    if not output.parent.is_dir():
        raise DataError(f"{output.parent}: no such directory")
    path = output.with_name(f".{output.name}.lock")
    descriptor = take_lock(path)
    if descriptor is None:
        raise DataError(f"{output}: another process is writing it")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def take_lock(path: Path, patience: float = 0.0) -> int | None:
    """Create and lock a file.

    Args:
        path: of the file; its folder is made if need be.
        patience: seconds to wait for another process that holds it.

    Returns:
        Its descriptor; None while another process holds it. Where the file system has no locks nobody does.

    Raises:
        OSError: the file cannot be opened.
    """
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_at(descriptor, path):
                return descriptor
            os.close(descriptor)  # who held it has removed it: another process may have made a new one
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.2)
        except OSError:
            return descriptor


def _is_open_at(descriptor: int, path: Path) -> bool:
    """Whether the file that is open is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
