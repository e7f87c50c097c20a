"""Finds ranks that hang: no step for a set time, then every rank's stack is printed and the job ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import Self

from mpi4py import MPI

GRACE = 3.0
"""Seconds between a rank's stack and the end of the job, in which the other ranks print theirs."""
EXIT_STATUS = 70


class Watchdog:
    """Ends the job when `tick` has not been called for `seconds`; a context manager, collective in effect.

    Ranks step together, so when one hangs all of them stand still and each prints its own stacks. One that was stopped
    (SIGSTOP, a dead node) prints nothing: the others say where they wait for it.

    Args:
        comm: whose rank is printed.
        seconds: without a step; 0: never.
    """

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        self._rank, self._ranks = comm.rank, comm.size
        self._seconds = seconds
        self._done = 0
        self._last = time.monotonic()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def tick(self, done: int) -> None:
        """Note that a step, or something else that may take as long, is done."""
        self._done, self._last = done, time.monotonic()

    def __enter__(self) -> Self:
        self.tick(self._done)
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        if self._seconds:
            self._thread.join()

    def _watch(self) -> None:
        while not self._leaving.wait(max(0.05, self._last + self._seconds - time.monotonic())):
            if time.monotonic() - self._last >= self._seconds:
                self._end()

    def _end(self) -> None:
        told = (
            f"rank {self._rank} of {self._ranks}: no step for {self._seconds:g} s, {self._done} done; "
            f"the job is ended. Its threads, the innermost call first:\n{stacks()}"
        )
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, told.encode())
        if self._leaving.wait(GRACE):
            return  # it moved after all, and left
        # Abort may itself wait for a lock that the hanging call holds.
        threading.Thread(target=self._kill_later, daemon=True).start()
        MPI.COMM_WORLD.Abort(EXIT_STATUS)

    def _kill_later(self) -> None:
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)


def stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to a descriptor, past Python's objects
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
