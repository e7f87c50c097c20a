"""Training that is interrupted and started again, by mpiexec as a user would."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from jobs.restart.signals import EXIT_STATUS
from jobs.restart.start import FolderLock
from jobs.run.file import RunFileError
from jobs.run.reader import RunReader
from tests.tiny_runs import Job, assert_same_outcome, checkpoints, steps_done

pytestmark = pytest.mark.timeout(400)

RANKS = 2
# flushed every step, so that a test can wait for one
SLOW = ["run.flush_every=1"], ["seconds=0.04"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run.h5"
    job = Job(path, RANKS)
    assert job.wait() == 0, job.said
    return path


def interrupted(path: Path, number: signal.Signals, step: int, settings: tuple[str, ...] = ()) -> int:
    """The step after which a signal to one rank stopped a run."""
    job = Job(path, RANKS, [*SLOW[0], *settings], SLOW[1])
    job.wait_for_step(step)
    os.kill(max(job.rank_processes()), number)
    assert job.wait() == EXIT_STATUS, job.said
    done = steps_done(path)
    assert f"{number.name}: stopped after step {done} with a checkpoint" in job.said
    assert checkpoints(path)[0].name == f"step-{done:08d}"
    with RunReader(path) as reader:
        assert reader.status == "interrupted"
    return done


@pytest.mark.long
def test_a_job_that_overwrites_and_is_queued_again_destroys_nothing_before_it_begins_and_then_continues(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.h5"
    overwrite = ("run.overwrite=true", *SLOW[0])
    job = Job(path, RANKS, ["training.seed=1", "training.steps=12"])
    assert job.wait() == 0, job.said
    left = path.read_bytes(), checkpoints(path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = Job(path, RANKS, overwrite, ["hang=1:build"])
    lock = path.with_suffix(".checkpoints") / "lock"
    while "Slurm job 7" not in (lock.read_text() if lock.exists() else ""):
        assert job.running, job.said
        time.sleep(0.05)
    os.kill(job.rank_processes()[0], signal.SIGKILL)
    assert job.wait() not in (0, 2, 75), job.said
    assert (path.read_bytes(), checkpoints(path)) == left
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    done = interrupted(path, signal.SIGUSR1, 13, overwrite)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    job = Job(path, RANKS, overwrite)
    assert job.wait() == 0, job.said
    assert f"resumed after step {done} from" in job.said
    assert_same_outcome(undisturbed, path)


def test_a_second_job_is_kept_from_the_same_checkpoints(tmp_path: Path) -> None:
    first = FolderLock(tmp_path / "run.checkpoints")
    with pytest.raises(RunFileError, match=f"in use by process {os.getpid()} on "):
        FolderLock(tmp_path / "run.checkpoints", patience=0.3)
    first.release()
    assert not (tmp_path / "run.checkpoints").exists()
    FolderLock(tmp_path / "run.checkpoints").release()
