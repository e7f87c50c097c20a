"""Start, resume and checkpointing of one job of a restartable run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from mpi4py import MPI
from torch import nn

from jobs.cluster.agreement import Refused, decide_on_root, decide_together, say
from jobs.config.config import Config, differences
from jobs.restart import files
from jobs.restart.checkpoint import Checkpointer
from jobs.restart.files import BadCheckpointError, Found, Manifest, remove_sets
from jobs.restart.signals import SignalNote, Watchdog
from jobs.restart.start import Start, checkpoint_folder, folder_lock, may_differ, plan_start
from jobs.restart.state import Progress, model_digest, restore, seed_generators
from jobs.run import provenance
from jobs.run.file import RunFile, RunFileError, RunInfo
from jobs.run.reader import read_record
from jobs.train.reduce.reduction import ReducingOptimizer
from oktopk.elastic import inherited_ranks

Used = TypeVar("Used")


def find(
    comm: MPI.Intracomm,
    folder: Path,
    identity: Mapping[str, Any],
    say: Callable[[str], object],
    use: Callable[[Found], Used],
    differing: Callable[[Manifest], list[str]] = lambda manifest: [],
) -> tuple[Found, Used] | None:
    """The newest set that all ranks can use; collective. Newer ones are set aside, for the run is about to write anew.

    Args:
        comm: the ranks that will continue.
        folder: of the sets; drafts that killed writers left in it are removed.
        identity: keys that the manifest of a set must have alike.
        say: gets one line for every set that is refused, the same on every rank.
        use: continues from a set; collective; raises BadCheckpointError on every rank alike where its contents are not a state of
            this run.
        differing: names what makes the set with this manifest one of another run; asked on rank 0.

    Returns:
        The set and what `use` returned, None when there is none at all.

    Raises:
        Refused: there are sets and none can be used, and all are left where they are; or a newer one than the one that can
            be used cannot be set aside. On every rank alike.

    Traffic: two small messages for every set tried, and one more for the one that is used.
    """

    def list_sets() -> list[Path]:
        files.remove_drafts(folder)
        return files.list_sets(folder)

    def check_manifest(path: Path) -> Manifest:
        manifest = files.read_manifest(path, identity)
        if named := differing(manifest):
            raise BadCheckpointError(f"of another run: {', '.join(named)}")
        return manifest

    def check_parts(path: Path, manifest: Manifest) -> None:
        """Of those that a rank needs; every part is needed by some rank."""
        needed = {comm.rank % manifest.ranks, *inherited_ranks(comm.rank, comm.size, manifest.ranks)}
        for name in (files.COMMON, *map(files.rank_file, sorted(needed))):
            files.check_part(path / name, manifest)

    refused: list[Path] = []
    bad = (BadCheckpointError,)
    for path in decide_on_root(comm, list_sets, (OSError,)):
        try:
            manifest = decide_on_root(comm, partial(check_manifest, path), bad, BadCheckpointError)
            decide_together(comm, partial(check_parts, path, manifest), bad, BadCheckpointError)
            candidate = Found(path, manifest.step, manifest.ranks)
            used = use(candidate)
        except BadCheckpointError as error:
            refused.append(path)
            say(f"checkpoint {path} refused: {error}")
            continue
        aside = decide_on_root(comm, lambda: list(map(files.set_aside, refused)), (OSError,))
        for before, after in zip(refused, aside, strict=True):
            say(f"checkpoint {before} set aside as {after.name}")
        return candidate, used
    if refused:
        raise Refused(
            f"no checkpoint in {folder} can be used, so the run cannot continue: repair or remove them, "
            "or start afresh with run.overwrite=true"
        )
    return None


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
        self._identity: dict[str, Any] = {}  # keys that the manifests of the run have alike
        self._lock = ExitStack()
        self._start: Start = decide_on_root(comm, self._begin, (RunFileError, OSError))
        self.complete = self._start.complete  # there is nothing left to do

    def _begin(self) -> Start:
        # planned when no other job writes the run any more
        unwritable: OSError | None = None
        with self._lock as lock:
            if self._config.checkpoint.enabled or self._config.run.overwrite:
                try:
                    lock.enter_context(folder_lock(self._folder))
                except OSError as error:
                    unwritable = error
            start = plan_start(self._config, self._comm.size, os.environ)
            if unwritable is not None and not start.complete:
                raise unwritable
            self._lock = lock.pop_all()
        return start

    def resume(self, model: nn.Module, optimizer: ReducingOptimizer) -> Progress:
        """Continue from the newest usable checkpoint if there is one, and say so; returns how far the run is.

        Raises:
            Refused: on every rank: there are checkpoints and none can be used.
        """
        method, seed = self._config.reduction.method, self._config.training.seed
        self._identity = {"model": model_digest(model), "method": method, "length": optimizer.length}
        resumed = self._start.resume and find(
            self._comm,
            self._folder,
            self._identity,
            self._say,
            lambda checkpoint: restore(checkpoint, model, optimizer, self._comm, seed),
            self._differing,
        )
        if not resumed:
            if self._start.saved_ranks is not None:
                self._say(
                    f"{self._config.run.file} was interrupted before its first checkpoint: begins again"
                )
            seed_generators(seed, self._comm.rank)
            return Progress()
        checkpoint, progress = resumed
        self._say(f"resumed after step {checkpoint.step} from {checkpoint.path}")
        if checkpoint.ranks != self._comm.size:
            self._say(
                f"{checkpoint.ranks} ranks wrote it and {self._comm.size} continue: residuals are redistributed, "
                "their sum over the ranks is kept"
            )
        return progress

    def create_run_file(self, info: RunInfo, progress: Progress) -> RunFile:
        """The run file with the steps up to the checkpoint in it; on rank 0 alone.

        From here on the run that it replaces is gone, and not before: a job may well end while it still loads.

        Raises:
            RunFileError, OSError: it cannot be written, or the earlier run's checkpoints not be removed.
        """
        if self._config.run.overwrite and not self._start.resume:
            # before the run file: what is left of both must not look like one run
            remove_sets(self._folder)
        path, there = self._config.run.file, self._start.saved_ranks is not None
        behind = progress.done
        earlier = read_record(path, behind) if behind and there else None
        file = RunFile(path, info, overwrite=self._config.run.overwrite or there, earlier=earlier)
        if file.done < behind:
            self._say(f"{path} lacks steps {file.done + 1} to {behind}: no file has them any more")
        return file

    def checkpointer(self, progress: Progress, watchdog: Watchdog) -> Checkpointer:
        """What takes the checkpoints of the steps from here on."""
        config = self._config
        return Checkpointer(
            self._comm,
            self._folder if config.checkpoint.enabled else None,
            {
                **self._identity,
                "config": json.loads(config.to_json()),
                "versions": provenance.versions() | {"mpi": provenance.mpi_library()},
                "host": provenance.host(),
                "commit": config.run.commit or provenance.commit(),
            },
            config.checkpoint,
            SignalNote(),
            watchdog,
            # a set must not say more steps are done than the run file on the disk
            record=Path(config.run.file),
            done=progress.done,
        )

    def _differing(self, manifest: Manifest) -> list[str]:
        # the run file, which plan_start asks, may have been moved away
        free = may_differ(self._comm.size, manifest.ranks)
        return differences(json.dumps(manifest.config), self._config.to_json(), free)

    def _say(self, message: str) -> None:
        say(self._comm, f"jobs.train: {message}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._lock.close()
