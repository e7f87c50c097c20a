"""Takes the checkpoints of a run on many ranks between two steps, and stops all ranks when a signal asks.

What one rank alone knows (a signal, the time) travels in a reduction of two integers that is begun after one step and read
after the next, so that all ranks act alike at the same step and none waits for it. Each rank then writes its own file, and
rank 0 makes a set of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from mpi4py import MPI
from safetensors import SafetensorError

from data.durable import sync
from jobs.cluster.agreement import decide_on_root, decide_together
from jobs.config.sections import CheckpointConfig
from jobs.restart import files
from jobs.restart.files import Manifest, Part
from jobs.restart.packing import pack
from jobs.restart.signals import Interrupted, Phase, SignalNote, Watchdog

State = Mapping[str, Any]
FAULTS = (OSError, SafetensorError)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on every rank alike. The one before is intact."""


class Checkpointer:
    """Takes the checkpoints of one run; a context manager around its steps. Every method is collective.

    Args:
        comm: duplicated.
        folder: of the sets, on a file system that all ranks share; None: nothing is written, and signals still stop the run.
        about: what the manifest says of the run, see `Manifest`.
        config: when they are due, besides at the end, and how many to keep. Whichever is first due counts anew for both measures.
        note: of the signals that ask to stop.
        watchdog: is told what comes next. The seconds that it gives a step are also what the files of a set may take.
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
        self._note, self._watchdog = note, watchdog
        self._sent, self._agreed = np.zeros(2, np.int64), np.zeros(2, np.int64)
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
        self._watchdog.enter(Phase.WRITING)
        self.save(done, *capture())
        self._watchdog.enter(Phase.STEPPING)
        if signal and not last:
            raise Interrupted(signal, done)

    def before_evaluation(self) -> None:
        """An evaluation comes next, which may take longer than a step."""
        self._watchdog.enter(Phase.EVALUATING)

    def save(self, done: int, common: State, own: State) -> None:
        """Take a checkpoint after step number `done`.

        Args:
            common: state that is equal on all ranks; rank 0's is kept.
            own: this rank's.

        Raises:
            CheckpointError: it could not be written.
        """
        self._complete_request()
        self._agreed[:] = 0  # what was asked before: a signal is sent again, and the time counts anew
        self._count_from(done)
        if self.folder is None:
            return
        draft, failed = files.draft_folder(self.folder, done), partial(self._failed, done)
        states = {
            files.rank_file(self.comm.rank): own,
            **({files.COMMON: common} if self.comm.rank == 0 else {}),
        }

        def write() -> dict[str, Part]:
            return {name: files.write_part(draft / name, pack(state)) for name, state in states.items()}

        gathered = self.comm.gather(decide_together(self.comm, write, FAULTS, failed)) or []
        self._watchdog.move()
        decide_on_root(self.comm, lambda: self._seal(done, gathered), FAULTS, failed)

    def _seal(self, done: int, gathered: list[dict[str, Part]]) -> None:
        """Make a set of the files of all ranks; on rank 0."""
        assert self.folder is not None
        every = {name: part for parts in gathered for name, part in parts.items()}
        if self._record is not None:
            sync(self._record)
        content = {"format": files.FORMAT, "step": done, "ranks": self.comm.size, "files": every}
        files.seal(self.folder, Manifest.model_validate({**self._about, **content}), self._config.keep)

    def _failed(self, done: int, problems: str) -> CheckpointError:
        if self.comm.rank == 0 and self.folder is not None:
            files.remove_drafts(self.folder)
        named = "; ".join(problems.splitlines())
        return CheckpointError(
            f"the checkpoint of step {done} could not be written to {self.folder}: {named}"
        )

    def _count_from(self, done: int) -> None:
        self._next, self._timed = done + self._config.every_steps, time.monotonic()

    def due(self, done: int) -> tuple[int, bool]:
        """The signal that asks to stop, 0 for none, and whether a checkpoint is due; the same on every rank."""
        self._complete_request()
        signal, time_is_up = self._agreed.tolist()
        minutes = self._config.every_minutes
        up = minutes > 0 and time.monotonic() - self._timed >= 60.0 * minutes
        self._sent[:] = self._note.received, up
        self._request = self.comm.Iallreduce(self._sent, self._agreed, MPI.MAX)
        by_steps = self._config.every_steps > 0 and done >= self._next
        return signal, bool(time_is_up or by_steps)

    def _complete_request(self) -> None:
        if self._request is not None:
            self._request.Wait()
            self._request = None

    def close(self) -> None:
        """Complete what is under way."""
        self._complete_request()
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
            self.close()
        self._watchdog.enter(Phase.ENDING)
