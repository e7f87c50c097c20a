"""Takes the checkpoints of a run on many ranks behind the steps that follow, and stops all ranks when a signal asks.

Each rank copies its state to host memory and goes on; a thread writes the copy. What one rank alone knows (a signal, the time,
that its part is on disk, that the disk is full) travels in a reduction of a few integers that is begun after one step and read
after the next, so that all ranks act alike at the same step and none waits for it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from mpi4py import MPI
from safetensors import SafetensorError

from data.durable import sync
from jobs.cluster.agreement import decide_together
from jobs.config.sections import CheckpointConfig
from jobs.restart import files
from jobs.restart.files import Manifest, Part
from jobs.restart.packing import Snapshot
from jobs.restart.signals import Interrupted, Phase, SignalNote, Watchdog

State = Mapping[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on every rank alike. The one before is intact."""


# how far a rank's thread is; the largest of all ranks counts
_IDLE, _BUSY, _FAILED = range(3)


class Checkpointer:
    """Takes the checkpoints of one run; a context manager around its steps. Every method is collective.

    Args:
        comm: duplicated.
        folder: of the sets, on a file system that all ranks share; None: nothing is written, and signals still stop the run.
        about: what the manifest says of the run, see `Manifest`.
        config: when they are due, besides at the end, and how many to keep. Whichever is first due counts anew for both measures.
        note: of the signals that ask to stop.
        watchdog: is told what comes next. The seconds that it gives a step are also what a set's files may take, and then rank
            0's making a set of them.
        record: a file of rank 0 that must be on disk before a set becomes valid.
        done: steps of the run so far.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        folder: Path | None,
        about: Mapping[str, Any],
        config: CheckpointConfig,
        note: SignalNote,
        watchdog: Watchdog,
        *,
        record: Path | None = None,
        done: int = 0,
    ) -> None:
        self.comm = comm.Dup()
        self.folder = folder
        self._about, self._config, self._record = about, config, record
        self._note, self._watchdog, self._patience = note, watchdog, watchdog.step or None
        self._common, self._own = Snapshot(), Snapshot()
        self._task: futures.Future[Any] | None = None  # this rank's thread
        self._began = 0.0
        self._writing: int | None = None  # the step whose set is not yet valid
        self._sealing = False  # all files of that are on disk
        self._sent, self._agreed = np.zeros(3, np.int64), np.zeros(3, np.int64)
        self._request: MPI.Request | None = None
        self._count_from(done)

    def after_step(
        self,
        done: int,
        *,
        last: bool,
        capture: Callable[[], tuple[State, State]],
        before: Callable[[], object],
    ) -> None:
        """Do what is due after step number `done`.

        Args:
            last: the run is complete with this step.
            capture: (common, own) state, see `save`.
            before: brings the record of the run up to this step; collective.

        Raises:
            Interrupted: a signal asked to stop; the checkpoint is valid.
            CheckpointError: one could not be written.
        """
        self._watchdog.tick(done)
        signal, due = self.due(done)
        if not (signal or due or last):
            return
        before()
        if signal or last:
            self._watchdog.enter(Phase.WAITING)
        self.save(done, *capture(), wait=bool(signal or last))
        self._watchdog.enter(Phase.STEPPING)
        if signal and not last:
            raise Interrupted(signal, done)

    def before_evaluation(self) -> None:
        """An evaluation comes next, which may take longer than a step."""
        self._watchdog.enter(Phase.EVALUATING)

    def save(self, done: int, common: State, own: State, *, wait: bool = False) -> None:
        """Take a checkpoint after step number `done`.

        Args:
            common: state that is equal on all ranks; rank 0's is kept.
            own: this rank's.
            wait: return when it is valid; else once it is copied.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        self.wait()
        self._count_from(done)
        if self.folder is None:
            self._forget()  # or the time that is up would be up once more
            return
        draft, snapshots = files.draft_folder(self.folder, done), {files.rank_file(self.comm.rank): self._own}
        self._own.take(own)
        if self.comm.rank == 0:
            self._common.take(common)
            snapshots[files.COMMON] = self._common
        self._writing = done
        self._begin(lambda: {name: files.write_part(draft / name, of) for name, of in snapshots.items()})
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when no checkpoint is being written. Raises CheckpointError."""
        while self._writing is not None:
            self._advance(self._patience)
            self._watchdog.move()

    def _count_from(self, done: int) -> None:
        self._next, self._timed = done + self._config.every_steps, time.monotonic()

    def due(self, done: int) -> tuple[int, bool]:
        """The signal that asks to stop, 0 for none, and whether a checkpoint is due; the same on every rank."""
        self._complete_request()
        signal, time_is_up, writing = self._agreed.tolist()
        minutes = self._config.every_minutes
        up = minutes > 0 and time.monotonic() - self._timed >= 60.0 * minutes
        self._sent[:] = self._note.received, up, self._state()
        self._request = self.comm.Iallreduce(self._sent, self._agreed, MPI.MAX)
        if writing == _FAILED:
            self._outcome(0.0)
        elif writing == _IDLE and self._writing is not None:
            self._advance(0.0)
        by_steps = self._config.every_steps > 0 and done >= self._next
        # one at a time: the next one stays due until this one is on disk
        return signal, self._writing is None and bool(time_is_up or by_steps)

    def _complete_request(self) -> None:
        if self._request is not None:
            self._request.Wait()
            self._request = None

    def _forget(self) -> None:
        """Forget what the ranks have agreed on: it was sent before the writing that begins. A signal is sent again."""
        self._complete_request()
        self._agreed[:] = 0, 0, _BUSY

    def _begin(self, write: Callable[[], object]) -> None:
        """Run `write` in a thread of its own.

        A daemon: one that is stuck in a dead file system must not keep the process from leaving.
        """
        task: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                task.set_result(write())
            except BaseException as error:
                task.set_exception(error)
                if not isinstance(error, OSError | SafetensorError):
                    raise

        self._task, self._began = task, time.monotonic()
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        self._forget()

    def _state(self) -> int:
        if self._task is None:
            return _IDLE
        if self._task.done():
            return _FAILED if self._task.exception() else _IDLE
        return _FAILED if self._late() else _BUSY

    def _late(self) -> bool:
        return self._patience is not None and time.monotonic() - self._began > self._patience

    def _advance(self, patience: float | None) -> None:
        """Go on to what follows the writing: rank 0 makes a set of the files; then it is valid. Raises CheckpointError."""
        written = self._outcome(patience)
        self._task = None
        if self._sealing:
            self._writing, self._sealing = None, False
            return
        self._sealing = True
        gathered: list[dict[str, Part]] | None = self.comm.gather(written)
        self._forget()
        if gathered is not None:
            every = {name: part for parts in gathered for name, part in parts.items()}
            content = {
                **self._about,
                "format": files.FORMAT,
                "step": self._writing,
                "ranks": self.comm.size,
                "files": every,
            }
            self._begin(functools.partial(self._seal, Manifest.model_validate(content)))

    def _seal(self, manifest: Manifest) -> None:
        assert self.folder is not None
        if self._record is not None:
            sync(self._record)
        files.seal(self.folder, manifest, self._config.keep)

    def _outcome(self, patience: float | None) -> Any:
        """What this rank's thread returns within so many seconds. Raises CheckpointError: it failed on some rank, or is late."""

        def result() -> Any:
            if self._task is None:
                return None
            futures.wait([self._task], patience)
            if self._task.done():
                return self._task.result()
            if patience or self._late():
                raise TimeoutError(f"not written within {self._patience:g} s")
            return None

        return decide_together(self.comm, result, (Exception,), self._failed)

    def _failed(self, problems: str) -> CheckpointError:
        self._complete_request()
        step, self._writing, self._sealing, self._task = self._writing, None, False, None
        if self.comm.rank == 0 and self.folder is not None:
            files.remove_drafts(self.folder)
        named = "; ".join(problems.splitlines())
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {named}"
        )

    def close(self) -> None:
        """Wait for what is being written. Raises CheckpointError."""
        self._complete_request()
        self.wait()
        self.comm.Free()

    def __enter__(self) -> Self:
        self._note.__enter__()
        self._watchdog.enter(Phase.STEPPING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note.__exit__(kind, error, trace)
        if self._watchdog.raised_together(kind):
            self._watchdog.enter(Phase.WAITING)
            self.close()
        self._watchdog.enter(Phase.ENDING)
