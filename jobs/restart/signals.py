"""Ends a job: when a signal asks all ranks to stop, and when ranks hang."""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
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


GRACE = 3.0
"""Seconds between a rank's stack and the end of the job, in which the other ranks print theirs."""
HUNG_STATUS = 70
_PULSE = 0.25


class Phase(enum.Enum):
    """Phases of a job, with their words in messages."""

    STARTING = "starting"
    STEPPING = "no step"
    EVALUATING = "evaluating"
    WAITING = "waiting for a checkpoint"
    ENDING = "ending"


class Watchdog:
    """Ends the job when nothing has moved for a set time; a context manager around all that a job does.

    Ranks step together, so when one hangs all of them stand still and each prints its own stacks. One that was stopped
    (SIGSTOP, a dead node) prints nothing: the others say where they wait for it. Time in which this process itself was stopped
    does not count: a job may be suspended.

    Args:
        comm: collective: a rank leaves when all do, so that one that hangs at its end is still found.
        step: seconds without a step; 0: for ever. A checkpoint that is waited for has its own bound, so it is given twice that.
        around: seconds that the start, an evaluation, and the end may take, each; 0: for ever.
        together: errors that every rank raises alike. With any other a rank leaves alone.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        step: float,
        around: float,
        together: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.step = step
        self._comm, self._around, self._together = comm, around, together
        self._phase = Phase.STARTING
        self._done = 0
        self._moves = 0
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def enter(self, phase: Phase) -> None:
        """Note what comes next."""
        self._phase = phase
        self.move()

    def tick(self, done: int) -> None:
        """Note that a step is done with all that belongs to it, and how many are."""
        self._done = done
        self.enter(Phase.STEPPING)

    def move(self) -> None:
        """Note that something is done that may take as long as what follows it."""
        self._moves += 1

    def raised_together(self, kind: type[BaseException] | None) -> bool:
        """Whether all ranks leave a block as this one does: without an error, or with the same one."""
        return kind is None or issubclass(kind, self._together)

    def __enter__(self) -> Self:
        if self.step or self._around:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.enter(Phase.ENDING)
        if self.raised_together(kind):
            self._comm.Barrier()
        self._leaving.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        seen, idle = self._moves, 0.0
        while not self._leaving.wait(_PULSE):
            # pulses and not the clock, which goes on while the process is stopped
            idle += _PULSE
            if self._moves != seen:
                seen, idle = self._moves, 0.0
            limits = {Phase.STEPPING: self.step, Phase.WAITING: 2.0 * self.step}
            seconds = limits.get(self._phase, self._around)
            if seconds and idle >= seconds:
                self._end(seconds)
                idle = 0.0

    def _end(self, seconds: float) -> None:
        seen = self._moves
        # stderr may be what hangs, and Abort may wait for a lock that the hanging call holds: the job must end all the same
        faulthandler.dump_traceback_later(3 * GRACE, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        self._tell(seconds)
        if self._leaving.wait(GRACE) or self._moves != seen:
            faulthandler.cancel_dump_traceback_later()
            return  # it moved after all: it was slow
        MPI.COMM_WORLD.Abort(HUNG_STATUS)

    def _tell(self, seconds: float) -> None:
        if sys.__stderr__ is None:
            return
        text = (
            f"rank {self._comm.rank} of {self._comm.size}: {self._phase.value} for {seconds:g} s, {self._done} steps "
            f"done; the job is ended unless it goes on within {GRACE:g} s. Its threads, the innermost call first:\n"
        )
        # in memory, as the file system may be what hangs, and written at once, as all ranks write
        with (
            open(os.memfd_create("stacks"), "w+b", buffering=0) as memory,
            contextlib.suppress(OSError, ValueError),
        ):
            memory.write(text.encode())
            faulthandler.dump_traceback(memory, all_threads=True)
            memory.seek(0)
            os.write(sys.__stderr__.fileno(), memory.read())  # an error: it is closed
