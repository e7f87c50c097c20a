"""Makes all ranks of a job decide alike: an error on one rank is raised on all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from data.command import show
from jobs.cluster.rank_check import launch_problem

Result = TypeVar("Result")
Faults = tuple[type[Exception], ...]


class Refused(Exception):  # noqa: N818 - a decision of all ranks together, not one rank's error
    """What was asked for cannot be done; raised on every rank together, the message meant for the user."""


def decide_on_root(
    comm: MPI.Intracomm, action: Callable[[], Result], faults: Faults, raises: type[Exception] = Refused
) -> Result:
    """Run the action on rank 0 alone and give its result to every rank; collective.

    Args:
        comm: its ranks decide.
        action: returns something that pickles.
        faults: what counts as the user's fault; any other exception ends the job as usual.
        raises: on every rank, with the fault's message.

    Traffic: one broadcast.
    """
    result, message = _tried(action, faults) if comm.rank == 0 else ([], None)
    message, result = comm.bcast((message, result))
    if message is not None:
        raise raises(message)
    return result[0]


def decide_together(
    comm: MPI.Intracomm,
    action: Callable[[], Result],
    faults: Faults,
    raises: Callable[[str], Exception] = Refused,
) -> Result:
    """Run the action on every rank and return this rank's result; collective. All give up when it fails on any.

    An action that communicates must fail on all ranks or on none.

    Args:
        comm, faults, raises: as decide_on_root; the message names the ranks unless the fault is the same on all.

    Traffic: one allgather.
    """
    result, message = _tried(action, faults)
    messages = comm.allgather(message)
    failed = {rank: text for rank, text in enumerate(messages) if text is not None}
    if not failed:
        return result[0]
    if len(failed) == comm.size and len(set(failed.values())) == 1:
        raise raises(failed[0])
    raise raises("\n".join(f"rank {rank}: {text}" for rank, text in failed.items()))


def _tried(action: Callable[[], Result], faults: Faults) -> tuple[list[Result], str | None]:
    try:
        return [action()], None
    except faults as fault:
        return [], str(fault) or type(fault).__name__


def require(comm: MPI.Intracomm, problem: Callable[[], str], raises: type[Exception] = Refused) -> None:
    """Raise on every rank where `problem` names one on some rank, "" being none; collective."""

    def check() -> None:
        if text := problem():
            raise raises(text)

    decide_together(comm, check, (raises,), raises)


def check_launch(comm: MPI.Intracomm, raises: type[Exception] = Refused) -> None:
    """Refuse to run as many jobs of one rank each, which a launcher of another MPI makes of a job; collective."""
    if problem := comm.bcast(launch_problem(MPI.COMM_WORLD.size, os.environ) if comm.rank == 0 else ""):
        raise raises(problem)


def say(comm: MPI.Intracomm, message: str, stream: Any = None) -> None:
    """Print on rank 0, by default to standard error."""
    if comm.rank == 0:
        show(message, file=stream or sys.stderr, flush=True)
