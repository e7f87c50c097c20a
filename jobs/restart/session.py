"""Start, resume and guarded steps of one job of a restartable run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mpi4py import MPI
from torch import nn

from data.durable import sync
from jobs.cluster.agreement import decide_on_root, say
from jobs.config.config import Config
from jobs.restart.checkpoint import Checkpointer, Due
from jobs.restart.files import Identity
from jobs.restart.resume import Found, find
from jobs.restart.signals import Interrupted, SignalNote
from jobs.restart.start import (
    FolderLock,
    Start,
    begin_afresh,
    checkpoint_folder,
    differing_settings,
    plan_start,
)
from jobs.restart.state import Progress, model_digest, restore, seed_generators
from jobs.restart.watchdog import Phase, Watchdog
from jobs.run import provenance
from jobs.run.file import RunFile, RunFileError, RunInfo
from jobs.run.reader import read_record
from jobs.train.agreement import NonFiniteLossError, RanksDiverged
from jobs.train.reduce.reduction import ReducingOptimizer
from oktopk import NonFiniteGradientError


@dataclass(frozen=True)
class Resumed:
    """Where a job continues.

    Attributes:
        progress: what earlier jobs of the run have done.
        identity: of checkpoints of this run.
    """

    progress: Progress
    identity: Identity


class Session:
    """A job's hold on its run; a context manager. Every method is collective.

    Args:
        config: the run's.
        comm: the ranks that train together.

    Raises:
        Refused: on every rank: there is a run file that this run cannot continue, or another job is at it.
    """

    def __init__(self, config: Config, comm: MPI.Intracomm) -> None:
        self._config, self._comm = config, comm
        self._folder = checkpoint_folder(config)
        self._lock: FolderLock | None = None
        self._start: Start = decide_on_root(comm, self._begin, (RunFileError, OSError))

    def _begin(self) -> Start:
        # planned when no other job writes the run any more
        unwritable: OSError | None = None
        if self._config.checkpoint.enabled or self._config.run.overwrite:
            try:
                self._lock = FolderLock(self._folder)
            except OSError as error:
                unwritable = error
        try:
            start = plan_start(self._config, self._comm.size, os.environ)
            if unwritable is not None and not start.complete:
                raise unwritable
            return start
        except BaseException:
            self._release()
            raise

    @property
    def complete(self) -> bool:
        return self._start.complete

    def resume(self, model: nn.Module, optimizer: ReducingOptimizer) -> Resumed:
        """Continue from the newest usable checkpoint if there is one, and say so.

        Raises:
            Refused: on every rank: there are checkpoints and none can be used.
        """
        identity = Identity(model_digest(model), self._config.reduction.method, optimizer.length)
        found, progress = None, Progress()

        def use(tried: Found) -> None:
            nonlocal progress
            progress = restore(tried, model, optimizer, self._comm, self._config.training.seed)

        if self._start.resume:
            found = find(self._comm, self._folder, identity, self._say, self._differing, use)
        if found is None:
            if self._start.saved_ranks is not None:
                self._say(
                    f"{self._config.run.file} was interrupted before its first checkpoint: begins again"
                )
            seed_generators(self._config.training.seed, self._comm.rank)
            return Resumed(Progress(), identity)
        self._say(f"resumed after step {found.step} from {found.path}")
        if found.ranks != self._comm.size:
            self._say(
                f"{found.ranks} ranks wrote it and {self._comm.size} continue: residuals are redistributed, "
                "their sum over the ranks is kept"
            )
        return Resumed(progress, identity)

    def create_run_file(self, info: RunInfo, resumed: Resumed) -> RunFile:
        """The run file with the steps up to the checkpoint in it; on rank 0 alone.

        From here on the run that it replaces is gone, and not before: a job may well end while it still loads.

        Raises:
            RunFileError, OSError: it cannot be written, or the earlier run's checkpoints not be removed.
        """
        if self._config.run.overwrite and not self._start.resume:
            begin_afresh(self._folder)
        path, there = self._config.run.file, self._start.saved_ranks is not None
        behind = resumed.progress.done
        earlier = read_record(path, behind) if behind and there else None
        file = RunFile(path, info, overwrite=self._config.run.overwrite or there, earlier=earlier)
        if file.done < behind:
            self._say(f"{path} lacks steps {file.done + 1} to {behind}: no file has them any more")
        return file

    def safeguard(self, resumed: Resumed, watchdog: Watchdog) -> Safeguard:
        """The safeguard of the steps from here on."""
        config, note = self._config, SignalNote()
        checkpointer = Checkpointer(
            self._comm,
            self._folder if config.checkpoint.enabled else None,
            resumed.identity,
            {
                "config": json.loads(config.to_json()),
                "versions": provenance.versions() | {"mpi": provenance.mpi_library()},
                "host": provenance.host(),
                "commit": config.run.commit or provenance.commit(),
            },
            config.checkpoint,
            patience=config.run.watchdog,
            received=lambda: note.received,
            # a set must not say more steps are done than the run file on the disk
            before_sealing=lambda: sync(Path(config.run.file)),
            moved=watchdog.move,
        )
        checkpointer.start(resumed.progress.done)
        return Safeguard(checkpointer, note, watchdog)

    def _differing(self, manifest: Mapping[str, Any]) -> list[str]:
        # the run file, which plan_start asks, may have been moved away
        saved = json.dumps(manifest.get("config", {}))
        return differing_settings(self._config, self._comm.size, saved, int(manifest["ranks"]))

    def _say(self, message: str) -> None:
        say(self._comm, f"jobs.train: {message}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


Capture = Callable[[], tuple[dict[str, Any], dict[str, Any]]]

# raised on every rank alike
_TOGETHER = (NonFiniteGradientError, NonFiniteLossError, RanksDiverged, RunFileError, Interrupted)


class Safeguard:
    """Guards the steps of a run; a context manager around them.

    Args:
        checkpointer: writes the checkpoints.
        note: that the checkpointer asks for signals.
        watchdog: of the job, told what comes next.
    """

    def __init__(self, checkpointer: Checkpointer, note: SignalNote, watchdog: Watchdog) -> None:
        self._checkpointer, self._note, self._watchdog = checkpointer, note, watchdog

    def after_step(self, done: int, *, last: bool, capture: Capture, before: Callable[[], object]) -> None:
        """Do what is due after step number `done`; collective.

        Args:
            last: the run is complete with this step.
            capture: (common, own) state, see jobs.restart.state.
            before: brings the record of the run up to this step; collective.

        Raises:
            Interrupted: a signal asked to stop; the checkpoint is valid.
            CheckpointError: one could not be written.
        """
        self._watchdog.tick(done)
        due = self._checkpointer.due(done, last=last)
        if due is Due.NOTHING:
            return
        before()
        if last or due is Due.STOP:
            self._watchdog.enter(Phase.WAITING)
            self._checkpointer.save(done, *capture(), wait=True)
            self._watchdog.enter(Phase.STEPPING)
        else:
            self._checkpointer.save(done, *capture())
            self._watchdog.move()
        if due is Due.STOP:
            raise Interrupted(self._checkpointer.stop_signal, done)

    def before_evaluation(self) -> None:
        """An evaluation comes next, which may take longer than a step."""
        self._watchdog.enter(Phase.EVALUATING)

    def __enter__(self) -> Self:
        self._note.__enter__()
        self._watchdog.enter(Phase.STEPPING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note.__exit__(kind, error, trace)
        if kind is None or issubclass(kind, _TOGETHER):
            self._watchdog.enter(Phase.WAITING)
            self._checkpointer.close()
        self._watchdog.enter(Phase.ENDING)
