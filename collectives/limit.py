"""A limit on the time that ranks wait for each other, over any library.

The ranks that come wait for an operation that can be looked at. A rank whose limit has passed leaves a note that all others find,
and each of them, which is waiting or comes later, raises too. How notes travel is the library's part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from collectives.errors import EVERY_RANK_CALLS, MissingRanksError

_EARLY = 1.0
"""Seconds after which a rank that waits for others sleeps in between, and looks whether one has given up."""

PAUSE = 1e-3
"""Seconds."""

ANSWER = 5.0
"""Seconds in which every rank that is waiting has looked."""

_ARRIVES = 0.1
"""Seconds in which a note that was left long ago arrives: a library may find it only when it has looked several times."""

_ABANDONED: list[object] = []
"""Operations that were given up, with their arrays: the library may still write to them."""


class Limit(NamedTuple):
    """How long ranks wait for the others.

    Attributes:
        what: begins, for the message.
        seconds: that the first rank to come waits. A rank under a debugger waits for ever.
        advice: a sentence that ends the message.
    """

    what: str
    seconds: float
    advice: str = EVERY_RANK_CALLS


class Note(NamedTuple):
    """What a rank that gives up tells the others.

    Attributes:
        waited: milliseconds that it has waited; -1: it came when the others had given up; ELSEWHERE: it will not come.
        what: it waited for, or with ELSEWHERE what it did; at most MOST_BYTES in UTF-8.
    """

    waited: int
    what: str


ELSEWHERE = -2
"""`Note.waited` of a rank that waited for other ranks than these, which did not come."""

MOST_BYTES = 56
"""Of `Note.what`."""


class Notes(Protocol):
    """The notes of ranks that give up; of all ranks, though an operation may be among some of them.

    Attributes:
        rank, size: this rank, and how many there are.
    """

    rank: int
    size: int

    def leave(self, note: Note) -> None:
        """Let all other ranks find this rank's note."""

    def any_left(self) -> bool:
        """Whether a note of another rank is here."""

    def collect(self) -> dict[int, Note]:
        """The notes that have come since the last call, by rank."""

    def close(self) -> Callable[[], bool]:
        """Let all other ranks find that this one closes; returns what tells whether nothing of that is under way any more."""

    def closed(self) -> set[int]:
        """The other ranks that have let this one find that, and not the reverse."""


class GivenUp:
    """What a transport and those that are split off it know of ranks that did not come.

    Attributes:
        notes: of the ranks of the first of these transports, so that all hear of it wherever they wait.
        others: notes of other ranks, which may wait for this one in a transport of theirs.
        error: that this rank has raised, None before.
        limit: on the last operation that was expected of all ranks, None before.
    """

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.others: list[Notes] = []
        self.error: MissingRanksError | None = None
        self.limit: Limit | None = None

    def leave(self, note: Note) -> None:
        """Let all ranks find this one's note, and those of the other transports that it waited here."""
        self.notes.leave(note)
        for notes in self.others:
            notes.leave(Note(ELSEWHERE, "waited for another rank that is missing, did not come"))


def wait_within(limit: Limit, done: Callable[[float], bool], given_up: GivenUp) -> None:
    """Wait for an operation of all ranks.

    Args:
        done: whether it is over; it may take so many seconds to find out. Kept for ever where it is given up, with its arrays.

    Raises:
        MissingRanksError: ranks did not come in time.
    """
    began, early = time.monotonic(), min(limit.seconds, _EARLY)
    waited = 0.0
    while not done(max(0.0, early - waited)):
        waited = time.monotonic() - began
        if waited > early:
            if given_up.notes.any_left() or (waited > limit.seconds and not _debugged()):
                _ABANDONED.append(done)
                raise missing_ranks(limit, given_up, waited)
            time.sleep(PAUSE)


def others_gave_up(notes: Notes) -> bool:
    """Whether a note of another rank is here, or comes within _ARRIVES; for a rank that comes late."""
    end = time.monotonic() + _ARRIVES
    while not (left := notes.any_left()) and time.monotonic() < end:
        time.sleep(PAUSE)
    return left


def missing_ranks(limit: Limit, given_up: GivenUp, waited: float | None = None) -> MissingRanksError:
    """Tell all ranks that this one gives up, and hear from those that are here how long they have waited.

    Args:
        waited: seconds that this rank has; None: it came when the others had given up.
    """
    own_note = Note(-1 if waited is None else int(1e3 * waited), call_of(limit).decode())
    notes = given_up.notes
    given_up.leave(own_note)
    came, closed = {notes.rank: own_note}, notes.closed()
    give_up = time.monotonic() + ANSWER
    while len(closed.union(came)) < notes.size and time.monotonic() < give_up:
        came |= notes.collect()
        closed = notes.closed()
        time.sleep(PAUSE)
    if closed := closed.difference(came):  # others may be slow
        did = "called close instead, and did not come"
        return MissingRanksError(limit.what, sorted(closed), limit.seconds, limit.advice, did)
    late = [rank for rank in range(notes.size) if rank not in came or came[rank].waited == -1]
    if late:
        return MissingRanksError(limit.what, late, limit.seconds, limit.advice)
    if elsewhere := [rank for rank in range(notes.size) if came[rank].waited == ELSEWHERE]:
        return MissingRanksError(limit.what, elsewhere, limit.seconds, limit.advice, came[elsewhere[0]].what)
    if (error := other_calls(limit, [came[rank].what for rank in range(notes.size)])) is not None:
        return error
    # the last to come began to wait while the others were giving up
    late = [min(came, key=lambda rank: came[rank].waited)]
    return MissingRanksError(limit.what, late, limit.seconds, limit.advice)


def call_of(limit: Limit) -> bytes:
    """The call that is limited, as ranks tell each other: at most MOST_BYTES in UTF-8."""
    return limit.what.encode()[:MOST_BYTES].decode(errors="ignore").encode()


def other_calls(limit: Limit, calls: list[str]) -> MissingRanksError | None:
    """The error of ranks that came to different calls, None where all came to one; that of most ranks is the right one."""
    common = max(calls, key=calls.count)  # of as many the one with the lowest rank
    others = {rank: call for rank, call in enumerate(calls) if call != common}
    if not others:
        return None
    did = f"called {', '.join(others.values())} instead, and did not come"
    return MissingRanksError(common, list(others), limit.seconds, limit.advice, did)


def _debugged() -> bool:
    """Whether a debugger may have stopped this process."""
    return sys.gettrace() is not None or "pydevd" in sys.modules or "debugpy" in sys.modules
