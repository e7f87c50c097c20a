"""Writes checkpoints of a run on many ranks, behind the steps that follow.

Each rank copies its state to host memory and goes on; a thread writes the copy. What one rank alone knows (a signal, the time,
that its part is on disk, that the disk is full) travels in a reduction of a few integers that is begun after one step and read
after the next, so that all ranks act alike at the same step and none waits for it.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from safetensors import SafetensorError

from jobs.config.sections import CheckpointConfig
from jobs.restart import files
from jobs.restart.files import Identity, Part
from jobs.restart.packing import Snapshot

Result = TypeVar("Result")
State = Mapping[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on every rank alike. The one before is intact."""


class Due(enum.Enum):
    """What all ranks are to do after a step."""

    NOTHING = enum.auto()
    SAVE = enum.auto()
    STOP = enum.auto()
    """Save, and leave."""


class _Task(Generic[Result]):
    """A function that runs in a thread of its own.

    A daemon: one that is stuck in a dead file system must not keep the process from leaving.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self.began = time.monotonic()
        self.results: list[Result] = []
        self.problem = ""
        self._function = function
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.results.append(self._function())
        except (OSError, SafetensorError) as error:
            self.problem = str(error) or repr(error)
        except BaseException as error:
            self.problem = repr(error)
            raise

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float | None) -> None:
        self._thread.join(seconds)


# what travels between the ranks; the largest of all ranks counts
_SIGNAL, _TIME, _PROBLEM, _BUSY = range(4)


class Checkpointer:
    """Writes the checkpoints of one run. Every method is collective.

    Args:
        comm: duplicated.
        folder: of the sets, on a file system that all ranks share; None: nothing is written, and signals still stop the run.
        identity: what the sets are of.
        about: what else the manifest says.
        config: when they are due, besides at the end, and how many to keep. Whichever is first due counts anew for both measures.
        patience: seconds that a set's files, and then rank 0's making a set of them, may take; 0: for ever.
        received: the number of the last signal that asks to stop, 0 for none.
        before_sealing: run by rank 0 before a set becomes valid: what must be on disk by then.
        moved: called between what may take that long each, while a set is waited for.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        folder: Path | None,
        identity: Identity,
        about: Mapping[str, Any],
        config: CheckpointConfig,
        *,
        patience: float = 0.0,
        received: Callable[[], int] = lambda: 0,
        before_sealing: Callable[[], object] = lambda: None,
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        self.comm = comm.Dup()
        self.folder = folder
        self.stop_signal = 0
        self._about = {**vars(identity), **about, "ranks": comm.size}
        self._config, self._patience = config, patience
        self._received, self._before_sealing, self._moved = received, before_sealing, moved
        self._common, self._own = Snapshot(), Snapshot()
        self._task: _Task[list[Part]] | None = None  # every rank's writing
        self._sealing: _Task[Path] | None = None  # rank 0's
        self._writing: int | None = None  # the step whose set is not yet valid
        self._saved = -1
        self._next = 0
        self._timed = time.monotonic()
        self._sent: NDArray[np.int64] = np.zeros(4, np.int64)
        self._agreed: NDArray[np.int64] = np.zeros(4, np.int64)
        self._request: MPI.Request | None = None
        self._stale = False

    def start(self, step: int) -> None:
        """Count the interval from `step`, where the run begins or resumes."""
        self._next = step + self._config.every_steps
        self._timed = time.monotonic()

    def due(self, done: int, *, last: bool) -> Due:
        """What to do after step number `done`; the same on every rank.

        Raises:
            CheckpointError: an earlier one could not be written.
        """
        flags = self._exchange()
        self._advance(flags)
        if flags[_SIGNAL] and not last:
            self.stop_signal = int(flags[_SIGNAL])
            return Due.STOP
        by_steps = self._config.every_steps > 0 and done >= self._next
        wanted = last or by_steps or bool(flags[_TIME])
        # One at a time. The next one stays due until this one is on disk.
        return Due.SAVE if wanted and (last or self._writing is None) else Due.NOTHING

    def save(self, done: int, common: State, own: State, *, wait: bool = False) -> None:
        """Take a checkpoint after step number `done`.

        Args:
            common: state that is equal on all ranks; rank 0's is kept.
            own: this rank's.
            wait: return when it is valid; else once it is copied.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        if self.folder is None:
            self._stale = True  # or the time that is up would be up once more
            self.start(done)
            return
        self._finish()
        if done != self._saved:
            parts: list[tuple[str, Snapshot]] = [(files.rank_file(self.comm.rank), self._own)]
            self._own.take(own)
            if self.comm.rank == 0:
                self._common.take(common)
                parts.append((files.COMMON, self._common))
            draft = files.draft_folder(self.folder, done)
            self._task = _Task(lambda: [files.write_part(draft / name, snapshot) for name, snapshot in parts])
            self._writing, self._stale = done, True
            self.start(done)
        if wait:
            self._finish()

    def wait(self) -> None:
        """Return when no checkpoint is being written. Raises CheckpointError."""
        self._finish()

    def close(self) -> None:
        """Wait for what is being written. Raises CheckpointError."""
        self._complete_request()
        self._finish()
        self.comm.Free()

    def _exchange(self) -> NDArray[np.int64]:
        """The flags that were sent after the step before; sends those of now."""
        self._complete_request()
        flags = self._agreed.copy()
        if self._stale:
            # sent before the writing that they would be about
            flags[_TIME], flags[_PROBLEM], flags[_BUSY] = 0, 0, 1
            self._stale = False
        # by rank 0's clock alone
        minutes = self._config.every_minutes if self.comm.rank == 0 else 0.0
        by_time = minutes > 0 and time.monotonic() - self._timed >= 60.0 * minutes
        busy = self._busy()  # first: a thread that fails in between must not look like one that is done
        self._sent[:] = (self._received(), by_time, bool(self._problem()), busy)
        self._request = self.comm.Iallreduce(self._sent, self._agreed, MPI.MAX)
        return flags

    def _complete_request(self) -> None:
        if self._request is not None:
            self._request.Wait()
            self._request = None

    def _busy(self) -> bool:
        return any(task is not None and task.running for task in (self._task, self._sealing))

    def _problem(self) -> str:
        for task in (self._task, self._sealing):
            if task is None:
                continue
            if task.problem:
                return task.problem
            if self._patience and task.running and time.monotonic() - task.began > self._patience:
                return f"not written within {self._patience:g} s"
        return ""

    def _advance(self, flags: NDArray[np.int64]) -> None:
        if self._writing is None:
            return
        if flags[_PROBLEM]:
            self._raise_if_any(self._problem())
        elif not flags[_BUSY]:
            if self._task is not None:
                self._seal()
            else:
                self._conclude()

    def _finish(self) -> None:
        """Wait until no set is being written."""
        if self._writing is None:
            return
        if self._task is not None:
            self._task.wait(self._patience or None)
            self._raise_if_any(self._problem())
            self._seal()
            self._moved()
        if self._sealing is not None:
            self._sealing.wait(self._patience or None)
        self._raise_if_any(self._problem())
        self._conclude()
        self._moved()

    def _seal(self) -> None:
        """Every rank's part is on disk: let rank 0 make them a set."""
        assert self._task is not None
        assert self._writing is not None
        assert self.folder is not None
        step, folder = self._writing, self.folder
        gathered = self.comm.gather(self._task.results[0])
        self._task, self._stale = None, True
        if gathered is None:
            return
        parts = [part for theirs in gathered for part in theirs]

        def seal() -> Path:
            self._before_sealing()
            return files.seal(folder, step, parts, self._about, self._config.keep)

        self._sealing = _Task(seal)

    def _conclude(self) -> None:
        assert self._writing is not None
        self._saved, self._writing, self._sealing = self._writing, None, None

    def _raise_if_any(self, problem: str) -> None:
        problems = self.comm.allgather(problem)
        if not any(problems):
            return
        self._complete_request()
        step, self._writing = self._writing, None
        if self.comm.rank == 0 and self.folder is not None:
            files.remove_drafts(self.folder)
        named = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
        raise CheckpointError(f"the checkpoint of step {step} could not be written to {self.folder}: {named}")
