"""Objects that were closed say so, whatever is asked of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.transport import Transport

OTHERS_CLOSE = 2.0
"""Seconds that a rank waits for the others to close, too."""


def closes(close: Callable[[Any], None]) -> Callable[[Any], None]:
    """A method after which each public method, property and call of its object raises RuntimeError; itself does nothing then.

    Plain attributes, such as a report or a number of steps, can still be read. An object that is open pays nothing.
    """

    @functools.wraps(close)
    def once(self: Any) -> None:
        if not hasattr(type(self), "_was_closed"):
            close(self)
        if not hasattr(type(self), "_was_closed"):  # by the method of the same name of a base class
            kind: Any = type(self)
            self.__class__ = _closed(kind, close.__name__)

    return once


def announce(transports: Sequence[Transport]) -> None:
    """Let ranks that wait for this one in one of these transports name `close`. Not collective.

    MPI frees a communicator once no message of it is under way: this rank waits until the others close, too, for two seconds. If
    they do not, what MPI holds stays until the end of the process.
    """
    announced = [each.announce_close() for each in transports]
    give_up = time.monotonic() + OTHERS_CLOSE
    for done in announced:
        while done is not None and not done() and time.monotonic() < give_up:
            time.sleep(1e-3)


@functools.cache
def _closed(kind: Any, close: str) -> type:
    """The class of what was closed by the method `close`: a subclass, so that `isinstance` holds as before."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"this {kind.__name__} was closed")

    def read(self: Any, name: str) -> Any:
        member = None if name.startswith("_") or name == close else getattr(kind, name, None)
        if callable(member) or isinstance(member, property):
            refuse(self)
        return object.__getattribute__(self, name)

    members: dict[str, Any] = {
        "_was_closed": True,
        "__getattribute__": read,
        "__module__": kind.__module__,
    }
    if hasattr(kind, "__call__"):  # noqa: B004 - of its objects
        members["__call__"] = refuse
    return type(kind.__name__, (kind,), members)
