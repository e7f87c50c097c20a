"""One writer per output: two calls that prepare the same file would take each other's parts away."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data import DataError


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Hold the right to write `output` within it, by a hidden file beside it that is gone afterwards.

    Args:
        output: about to be written; need not exist.

    Raises:
        DataError: another process holds the right, or the folder does not exist.
        OSError: the file system is broken or full; a folder that cannot be written is no error yet.
    """
    if not output.parent.is_dir():
        raise DataError(f"{output.parent}: no such directory")
    path = output.with_name(f".{output.name}.lock")
    descriptor = _taken(output, path)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Whether the file that is open is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _taken(output: Path, path: Path) -> int | None:
    """The lock, open; None where nobody can write: what is there can still be looked at."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS):
                return None
            raise
        held = _locks(descriptor)
        if held and is_open_at(descriptor, path):
            return descriptor
        os.close(descriptor)
        if not held:
            raise DataError(f"{output}: another process is writing it")
        # who held it has removed the file


def _locks(descriptor: int) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: nothing to be had
    return True
