"""A limit on the time that ranks wait for each other, over any communicator.

The ranks that come wait for a nonblocking collective operation. A rank whose limit has passed tells all others by a note, and
each of them, which is waiting or comes later, raises too.
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.transport import EVERY_RANK_CALLS, MissingRanksError

_EARLY = 1.0
"""Seconds after which a rank that waits for others sleeps in between, and looks whether one has given up."""

_PAUSE = 1e-3
"""Seconds."""

_ANSWER = 5.0
"""Seconds in which every rank that is waiting has looked."""

_CALLERS_TAG = 32_749
"""Of the notes on a caller's communicator, which carries the caller's messages too."""

_ABANDONED: list[Any] = []
"""Requests that were given up, with their arrays: MPI may still write to them."""


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


def wait_for_all(comm: MPI.Intracomm, limit: Limit) -> None:
    """Wait until all ranks of a caller's communicator have called. Collective.

    Raises:
        MissingRanksError: ranks did not come in time; on the others, and on a missing one when it comes. The communicator must
            not be used after that.

    Traffic: one nonblocking barrier.
    """
    if comm.Get_size() > 1:
        wait_for_request(comm.Ibarrier(), (), comm, _CALLERS_TAG, limit)
        if someone_gave_up(comm, _CALLERS_TAG):
            raise missing_ranks(comm, _CALLERS_TAG, limit)


def wait_for_request(
    request: MPI.Request, arrays: tuple[Any, ...], comm: MPI.Intracomm, tag: int, limit: Limit
) -> None:
    """Wait for a nonblocking collective operation.

    Args:
        request: of the operation.
        arrays: that it reads and writes.
        comm, tag: of the notes of ranks that give up; the operation may be among some of its ranks.

    Raises:
        MissingRanksError: ranks did not come in time.
    """
    began, early = time.monotonic(), min(limit.seconds, _EARLY)
    while not request.Test():
        waited = time.monotonic() - began
        if waited > early:
            if someone_gave_up(comm, tag) or (waited > limit.seconds and not _debugged()):
                _ABANDONED.append((request, arrays))
                raise missing_ranks(comm, tag, limit, waited)
            time.sleep(_PAUSE)


def someone_gave_up(comm: MPI.Intracomm, tag: int) -> bool:
    """Whether a note of another rank is here."""
    return comm.Iprobe(MPI.ANY_SOURCE, tag)


def missing_ranks(
    comm: MPI.Intracomm, tag: int, limit: Limit, waited: float | None = None
) -> MissingRanksError:
    """Tell all ranks that this one gives up, and hear from those that are here how long they have waited.

    Args:
        waited: seconds that this rank has; None: it came when the others had given up.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    note = np.array([-1 if waited is None else int(1e3 * waited)], np.int64)
    _ABANDONED.append((note, [comm.Isend(note, other, tag) for other in range(size) if other != rank]))
    came = {rank: int(note[0])}
    give_up = time.monotonic() + _ANSWER
    while len(came) < size and time.monotonic() < give_up:
        if not someone_gave_up(comm, tag):
            time.sleep(_PAUSE)
            continue
        status, theirs = MPI.Status(), np.empty(1, np.int64)
        comm.Recv(theirs, MPI.ANY_SOURCE, tag, status)
        came[status.Get_source()] = int(theirs[0])
    late = [other for other in range(size) if came.get(other, -1) < 0]
    if not late:  # the last to come began to wait while the others were giving up
        late = [min(came, key=lambda other: came[other])]
    return MissingRanksError(limit.what, late, limit.seconds, limit.advice)


def _debugged() -> bool:
    """Whether a debugger may have stopped this process."""
    return sys.gettrace() is not None or "pydevd" in sys.modules or "debugpy" in sys.modules
