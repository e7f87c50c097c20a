"""Decides how a run begins: afresh, from an earlier job, or not at all because it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from data.durable import take_lock
from data.prepared_file import data_checksum
from jobs.config.config import Config, differences
from jobs.run import provenance
from jobs.run.file import RunFileError, RunInfo, check_creatable
from jobs.run.reader import RunReader, check_readable

# What may differ between a run and its continuation: nothing that it computes depends on these; on `deferred` only what becomes
# of the few steps that need the host's help; between flat steps and two levels the sum of the residuals is kept.
_FREE = frozenset(
    {
        "run",
        "checkpoint",
        "training.threads",
        "training.device",
        "reduction.deferred",
        "reduction.levels",
        "reduction.ranks_per_host",
    }
)


class Start(NamedTuple):
    """How a run begins.

    Attributes:
        resume: look for a checkpoint.
        complete: there is nothing left to do.
        saved_ranks: ranks of the run file that is there, None if there is none.
    """

    resume: bool
    complete: bool = False
    saved_ranks: int | None = None


def checkpoint_folder(config: Config) -> Path:
    """Folder of the run's checkpoints."""
    run_file = Path(config.run.file)
    return Path(config.checkpoint.folder or run_file.with_name(f"{run_file.stem}.checkpoints"))


def plan_start(config: Config, ranks: int, environ: Mapping[str, str]) -> Start:
    """How the run begins; on one process, and before minutes of loading.

    A run file of the same configuration is continued, whatever became of its writer. Overwriting replaces what earlier jobs
    left. What this job wrote before Slurm started it again is continued; until it has written, the earlier run is there still.

    Raises:
        RunFileError: the run file that is there is none, or is of another configuration.
    """
    path = Path(config.run.file)
    overwrite, there = config.run.overwrite, path.is_file()
    restarted = environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if not config.checkpoint.enabled or (overwrite and not (restarted and there)):
        check_creatable(path, overwrite=overwrite)
        return Start(resume=False)
    if not there:
        check_creatable(path, overwrite=False)
        return Start(resume=True)
    try:
        check_readable(path)
        with RunReader(path) as reader:
            info, status = reader.info, reader.status
    except RunFileError as error:
        raise RunFileError(f"{_exists(path)}; it cannot be continued: {error}") from error
    if overwrite and info.job != environ.get("SLURM_JOB_ID", ""):
        return Start(resume=False)
    if differing := differing_run(info, config, may_differ(ranks, info.ranks)):
        raise RunFileError(f"{_exists(path)}; it is of another run: {', '.join(differing)}")
    return Start(resume=True, complete=status == "complete", saved_ranks=info.ranks)


def may_differ(ranks: int, saved_ranks: int) -> frozenset[str]:
    """What may differ between a run and its continuation, see `differences`."""
    return _FREE | {"training.batch_size"} if saved_ranks != ranks else _FREE


def differing_run(info: RunInfo, config: Config, free: frozenset[str]) -> list[str]:
    """What tells a run from the one of a configuration, see `differences`.

    Data that may lie elsewhere must have the name of their file and, where they are there and the run file knows it, their
    checksum.
    """
    unlike = differences(info.config, config.to_json(), free)
    there, here = Path(json.loads(info.config).get("data", {}).get("path") or ""), Path(config.data.path)
    checksum = data_checksum(config.data.path)
    if there.name != here.name and "data.path" in free:
        unlike.append(f"data: {there.name!r} there, {here.name!r} here")
    elif checksum and info.data and checksum != info.data:
        unlike.append(f"data: checksum {info.data} there, {checksum} here")
    return unlike


def _exists(path: Path) -> str:
    return f"run file {path} exists: choose another name (run.file) or allow it to be replaced (run.overwrite=true)"


@contextmanager
def folder_lock(folder: Path, patience: float = 15.0) -> Iterator[None]:
    """Keep a second job from writing the same checkpoints, within it or until the process ends, however it ends.

    A folder in which nothing was written is removed afterwards.

    Args:
        folder: made if need be.
        patience: seconds that an earlier job of the run may take to be gone.

    Raises:
        RunFileError: another process holds it.
        OSError: the folder cannot be written.
    """
    path = folder / "lock"
    descriptor = take_lock(path, patience)
    if descriptor is None:
        holder = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        raise RunFileError(f"{folder} is in use by {holder or 'another process'}")
    job = provenance.job()
    holder = f"process {os.getpid()} on {provenance.host()}{f', Slurm job {job}' if job else ''}\n"
    with suppress(OSError):  # on a full disk the holder has no name
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())
    try:
        yield
    finally:
        # on a lost file system there is nothing to tidy, and the error that it caused is the one to be told
        with suppress(OSError):
            if os.listdir(folder) == [path.name]:
                path.unlink()
                folder.rmdir()
        with suppress(OSError):
            os.close(descriptor)
