"""Notes signals that ask a run to stop; ranks act when all have agreed on the step."""

from __future__ import annotations

import faulthandler
import signal
import sys
from types import FrameType
from typing import NoReturn, Self

from mpi4py import MPI

STOPPING = (signal.SIGUSR1, signal.SIGTERM)
SHOWING = signal.SIGUSR2
EXIT_STATUS = 75
"""How a job says that it stopped with a checkpoint and wants to be started again: sysexits' "try again later"."""


class Interrupted(SystemExit):
    """The run stopped at a step that all ranks agreed on; raised on every rank alike."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(EXIT_STATUS)
        self.signal_number = signal_number
        self.signal_name = signal.Signals(signal_number).name
        self.step = step


def leave(status: int) -> NoReturn:
    """End this rank with the status that all ranks leave with; collective when it is not 0.

    At the first status that is not 0 a launcher ends the ranks that are still there, and srun then reports their SIGTERM
    instead. They are about to leave by themselves, so they ignore it, and a SIGUSR1 that comes late.
    """
    if status and MPI.Is_initialized():
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        MPI.COMM_WORLD.Barrier()
        # finalized, so that mpi4py's runner does not turn the status into an abort
        MPI.Finalize()
    sys.exit(status)


def heed_again() -> None:
    """Let a signal that asks to stop end this process again, for one that goes on after a run."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)


def show_when_asked() -> None:
    """From here on SIGUSR2 prints the stacks of all threads and changes nothing; again is allowed."""
    if sys.__stderr__ is not None:
        faulthandler.register(SHOWING, file=sys.__stderr__, all_threads=True)
        # The batch scripts start ranks with it and SIGUSR1 blocked, so that none comes while Python starts.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SHOWING})


class SignalNote:
    """Notes SIGUSR1 and SIGTERM instead of dying of them; a context manager, for the main thread.

    Both are ignored afterwards: a second one must not kill a run that has just stopped as the first one asked.

    Attributes:
        received: the number of the last signal noted, 0 for none.
    """

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> Self:
        for number in STOPPING:
            signal.signal(number, self._note)
        show_when_asked()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def __exit__(self, *raised: object) -> None:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
