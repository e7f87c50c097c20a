"""Finds ranks that hang: no step for a set time, then every rank's stack is printed and the job ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
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
        seen = self._last
        # whatever there is no telling with, the job must end
        with contextlib.suppress(Exception):
            self._tell()
        if self._leaving.wait(GRACE) or self._last != seen:
            return  # it moved after all: it was suspended with the whole job, or slow
        try:
            # Abort may itself wait for a lock that the hanging call holds.
            threading.Thread(target=self._kill_later, daemon=True).start()
        finally:
            MPI.COMM_WORLD.Abort(EXIT_STATUS)

    def _tell(self) -> None:
        if sys.__stderr__ is None:
            return
        told = (
            f"rank {self._rank} of {self._ranks}: no step for {self._seconds:g} s, {self._done} done; the job is ended "
            f"unless one comes within {GRACE:g} s. Its threads, the innermost call first:\n{stacks()}"
        )
        os.write(sys.__stderr__.fileno(), told.encode())

    def _kill_later(self) -> None:
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)


def stacks() -> str:
    """The stacks of all threads of this process, as far as 64 KiB hold them."""
    # no file: the file system may be what hangs
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        faulthandler.dump_traceback(writer, all_threads=True)
    finally:
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8", errors="replace") as file:
            told = file.read()
    return told
