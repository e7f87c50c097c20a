"""How a run begins: afresh, continued, or not at all."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from data.prepared_file import data_checksum
from jobs.cluster.agreement import Refused
from jobs.config.config import Config
from jobs.restart.session import Session
from jobs.restart.start import Start, checkpoint_folder, folder_lock, plan_start
from jobs.run.file import RunFile, RunFileError, RunInfo
from tests.jobs.run.test_file import INFO
from tests.small_experiment import write_images


def config(path: Path, **sections: Any) -> Config:
    run = {"file": str(path), **sections.pop("run", {})}
    return Config.model_validate({"training": {"steps": 10}, **sections, "run": run})


def leave_run_file(
    path: Path, made: Config, status: str, ranks: int = 4, job: str = "", data: str = ""
) -> None:
    info = RunInfo(**{**vars(INFO), "config": made.to_json(), "ranks": ranks, "job": job, "data": data})
    RunFile(path, info, overwrite=True).close(status)


@pytest.mark.parametrize("status", ["running", "failed", "interrupted", "complete"])
def test_an_interrupted_run_continues_and_a_complete_one_not(tmp_path: Path, status: str) -> None:
    made = config(tmp_path / "run.h5")
    assert plan_start(made, 4, {}) == Start(resume=True)
    leave_run_file(tmp_path / "run.h5", made, status)
    assert plan_start(made, 4, {}) == Start(resume=True, complete=status == "complete", saved_ranks=4)


def test_a_run_is_only_continued_with_its_own_settings(tmp_path: Path) -> None:
    path, steps = tmp_path / "run.h5", {"steps": 10}
    leave_run_file(path, config(path, reduction={"method": "ddp"}), "interrupted")

    def other(**sections: Any) -> Config:
        return config(path, **{"reduction": {"method": "ddp"}} | sections)

    # nothing that is computed depends on these
    free = other(training=steps | {"threads": 2}, checkpoint={"keep": 5}, run={"watchdog": 5.0})
    assert plan_start(free, 4, {}).resume
    # the batch may follow the number of ranks, and nothing else
    batch = other(training=steps | {"batch_size": 32})
    assert plan_start(batch, 2, {}).resume
    for own, ranks, differing in (
        (batch, 4, "batch_size: 16 there, 32 here"),
        (other(training=steps | {"seed": 3}), 2, r"training\.seed: 0 there, 3 here"),
        (other(reduction={"method": "ddp", "bucket_mb": 100.0}), 4, r"reduction\.bucket_mb: "),
    ):
        with pytest.raises(RunFileError, match=f"of another run: .*{differing}"):
            plan_start(own, ranks, {})


def test_a_run_only_continues_with_its_data(tmp_path: Path) -> None:
    path, images = tmp_path / "run.h5", write_images(tmp_path / "images.h5")
    made = config(path, data={"name": "prepared", "path": str(images)})
    for known in (data_checksum(images), ""):  # the run began without a file of data
        leave_run_file(path, made, "interrupted", data=known)
        assert plan_start(made, 4, {}).resume
    leave_run_file(path, made, "interrupted", data="01234567-89abcdef")
    with pytest.raises(
        RunFileError, match=f"data: checksum 01234567-89abcdef there, {data_checksum(images)} here"
    ):
        plan_start(made, 4, {})
    images.unlink()  # the run itself says more of that
    assert plan_start(made, 4, {}).resume


def test_a_requeued_job_that_overwrites_continues_its_own_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.h5"
    wiped = config(path, run={"overwrite": True})
    again = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    # before it wrote anything: the earlier run is there still, complete, of other settings, or moved away
    for earlier in (wiped, config(path, training={"steps": 10, "seed": 3})):
        for status in ("complete", "interrupted"):
            leave_run_file(path, earlier, status, job="6")
            assert plan_start(wiped, 4, again) == Start(resume=False)
    path.unlink()
    assert not plan_start(wiped, 4, again).resume
    leave_run_file(path, wiped, "interrupted", job="7")
    assert plan_start(wiped, 4, again).resume
    for first in ({**again, "SLURM_RESTART_COUNT": "0"}, {}):
        assert not plan_start(wiped, 4, first).resume
    # whose it is cannot be told, and there may be checkpoints of hours
    os.truncate(path, 100)
    with pytest.raises(RunFileError, match="it cannot be continued"):
        plan_start(wiped, 4, again)


def test_without_checkpoints_nothing_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    off = config(path, checkpoint={"enabled": False})
    assert not plan_start(off, 4, {}).resume
    leave_run_file(path, off, "interrupted")
    with pytest.raises(RunFileError, match="exists: choose another name"):
        plan_start(off, 4, {})


def test_checkpoints_are_beside_the_run_file_or_as_told(tmp_path: Path) -> None:
    assert checkpoint_folder(config(tmp_path / "a.b.h5")) == tmp_path / "a.b.checkpoints"
    told = config(tmp_path / "run.h5", checkpoint={"folder": "/scratch/run"})
    assert checkpoint_folder(told) == Path("/scratch/run")


def test_a_lock_whose_folder_is_lost_is_released_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "shared" / "checkpoints"
    with folder_lock(folder):
        folder.parent.rename(tmp_path / "gone")


def test_who_waited_for_a_removed_lock_holds_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    second = folder_lock(folder)
    with ThreadPoolExecutor() as others:
        with folder_lock(folder):
            waiting = others.submit(second.__enter__)
            time.sleep(0.5)  # long enough to be waiting, most of the time
        waiting.result()
    assert folder.exists()
    with (
        pytest.raises(RunFileError, match=f"is in use by process {os.getpid()} on "),
        folder_lock(folder, patience=0.0),
    ):
        pass
    second.__exit__(None, None, None)
    assert not folder.exists()


def test_a_job_plans_when_the_one_before_it_is_gone(tmp_path: Path) -> None:
    made = config(tmp_path / "run.h5")
    folder = checkpoint_folder(made)
    with ThreadPoolExecutor() as others:
        with folder_lock(folder):
            waiting = others.submit(Session, made, MPI.COMM_SELF)
            time.sleep(0.5)  # long enough to be waiting, most of the time
            leave_run_file(tmp_path / "run.h5", made, "complete", ranks=1)
        with waiting.result() as second:
            assert second.complete
    assert not folder.exists()


@pytest.mark.parametrize("status", ["complete", "interrupted"])
def test_only_a_complete_run_needs_no_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    made = config(tmp_path / "run.h5")
    leave_run_file(tmp_path / "run.h5", made, status, ranks=1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "run.checkpoints")

    monkeypatch.setattr("jobs.restart.session.folder_lock", refuse)
    if status == "complete":
        assert Session(made, MPI.COMM_SELF).complete
        return
    with pytest.raises(Refused, match="Permission denied"):
        Session(made, MPI.COMM_SELF)


def test_a_job_that_is_refused_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "run.h5").write_text("no run file")
    with pytest.raises(Refused, match=r"run\.h5 is not a run file"):
        Session(config(tmp_path / "run.h5"), MPI.COMM_SELF)
    assert [path.name for path in tmp_path.iterdir()] == ["run.h5"]
