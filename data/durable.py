"""Creates, locks and replaces files, on to the disk itself and through no link: every file that a job writes is opened here."""

from __future__ import annotations

import fcntl
import os
import stat
import time
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
    """Path of the draft that replaces `path`; a killed process leaves it, and the next one removes it."""
    return path.with_name(f".{path.name}.part")


def obstacle(path: Path) -> str:
    """Why no file of this program may replace what is at `path`, for a sentence about it; "" where nothing prevents it.

    Links, directories, devices, pipes and sockets are left alone.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return ""


def _refuse_obstacle(path: Path) -> None:
    if in_the_way := obstacle(path):
        raise OSError(f"{path} {in_the_way}")


def create(path: Path) -> int:
    """Create a file in place of one that may be there.

    Returns:
        Its descriptor, to read and write.

    Raises:
        OSError: something else is at `path`, see `obstacle`; or it cannot be created.
    """
    _refuse_obstacle(path)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A draft to write within the block; at its end the draft replaces `path`, on an error it is removed.

    Whatever happens, a file at `path` is whole, the old one or the new one. The draft may still be open, as one that is
    written on afterwards is. Its name is valid within the block alone, and has no suffix.

    Raises:
        OSError: a link or a device is at `path` or where the draft goes, another process writes the
            same file, or the disk is full or broken.
    """
    _refuse_obstacle(path)
    draft = draft_of(path)
    descriptor = create(draft)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
        os.fsync(descriptor)
        if not _is_open_at(descriptor, draft):
            raise OSError(f"{path}: another process is writing it")
        os.replace(draft, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            if _is_open_at(descriptor, draft):
                draft.unlink()
        raise
    finally:
        os.close(descriptor)


def take_lock(path: Path, patience: float = 0.0) -> int | None:
    """Create and lock a file.

    Args:
        path: of the file; its folder is made if need be.
        patience: seconds to wait for another process that holds it.

    Returns:
        Its descriptor; None while another process holds it. Where the file system has no locks nobody does.

    Raises:
        OSError: a link or a device is at `path`, or the file cannot be opened.
    """
    deadline = time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_obstacle(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
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
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
