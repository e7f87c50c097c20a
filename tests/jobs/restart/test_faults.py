"""Ranks that are killed, stopped, stuck or wrong, and disks that are full: the job ends soon and can go on."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.restart import files
from jobs.run.reader import RunReader
from tests.tiny_runs import Job, assert_same_outcome, last_good_step, steps_done

RANKS = 2
DEADLINE = 10.0  # for a job to end; under load, where it takes longer to start, as long as that
WATCHDOG = 6.0
SLOW = ["run.flush_every=1"], ["seconds=0.02"]
ENDLESS = [*SLOW[0], "training.steps=2000", "training.eval_every=1000"]
WAITS = pytest.mark.long("waits for a watchdog; `make test` has a rank that hangs in a step")
DISK = pytest.mark.long("a job on a disk of its own; `make test` has writes that fail, in one process")


@pytest.mark.long("22 jobs of 3 ranks; `make test` has a kill in a checkpoint, on 2 ranks")
@pytest.mark.timeout(1200)
def test_after_twenty_kills_a_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """At the start, at any moment of a step, and while a checkpoint is written, in turn."""
    chance, ranks = random.Random(1), 3
    settings = ["training.steps=1200", "training.eval_every=100"]
    path, undisturbed = tmp_path / "run.h5", tmp_path / "undisturbed.h5"
    job = Job(undisturbed, ranks, settings)
    assert job.wait() == 0, job.said
    resumed_at = 0
    for moment in ("start", "step", "checkpoint", "step", "step") * 4:
        job = Job(path, ranks, [*settings, *SLOW[0]], SLOW[1])
        if moment == "start":
            while len(job.rank_processes()) < ranks and job.running:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 3.0))
        else:
            # with a checkpoint of its own, which is every 10 steps
            job.wait_for_step(resumed_at + 15)
            if moment == "step":
                time.sleep(chance.uniform(0.0, 1.0))
            else:
                wait_for_a_draft(job)
        kill_a_rank(job, chance, at_start=moment == "start")
        if resumed_at and moment != "start":
            assert f"resumed after step {resumed_at} from" in job.said
        resumed_at = last_good_step(path)
        # readable, and never behind the checkpoint
        assert steps_done(path) >= resumed_at
    job = Job(path, ranks, settings)
    assert job.wait() == 0, job.said
    assert f"resumed after step {resumed_at} from" in job.said
    assert 0 < resumed_at < 1200
    assert_same_outcome(undisturbed, path)


def kill_a_rank(job: Job, chance: random.Random, at_start: bool = False) -> None:
    """By SIGKILL, which ends the job, and all its ranks, by the deadline."""
    os.kill(chance.choice(job.rank_processes()), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(60) not in (0, 2, 75), job.said
    deadline = killed + max(DEADLINE, killed - job.began)
    assert time.monotonic() < deadline
    said = job.said.lower()
    # of a rank that it loses while they get to know each other the launcher says something else
    assert "signal 9" in said or (at_start and "pmix error" in said)
    assert_gone(job, deadline)


def wait_for_a_draft(job: Job, seconds: float = 120.0) -> None:
    """Return when a checkpoint is being written; it may be whole a moment later."""
    end = time.monotonic() + seconds
    while not any(job.path.with_suffix(".checkpoints").glob(".step-*")):
        assert job.running, job.said
        assert time.monotonic() < end, f"no checkpoint in {seconds} s"
        time.sleep(0.0005)


def assert_gone(job: Job, deadline: float) -> None:
    while job.rank_processes():
        assert time.monotonic() < deadline, f"ranks {job.rank_processes()} outlive their job"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run of which a rank was killed while a checkpoint was written."""
    path = tmp_path_factory.mktemp("killed") / "run.h5"
    job = Job(path, RANKS, ENDLESS, SLOW[1])
    job.wait_for_step(15)
    wait_for_a_draft(job)
    kill_a_rank(job, random.Random(1))
    return path


@pytest.fixture(scope="module")
def hung(killed: Path) -> Job:
    """The job that continued it, until rank 1 hung in a step, and its watchdog ended it."""
    resumed_at = last_good_step(killed)
    job = Job(killed, RANKS, [*ENDLESS, f"run.watchdog={WATCHDOG}"], [f"hang=1:{resumed_at + 15}"])
    job.wait()
    assert f"resumed after step {resumed_at} from" in job.said
    return job


@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_ends_the_job_which_can_go_on(killed: Path) -> None:
    resumed_at = last_good_step(killed)
    assert resumed_at >= 10
    # readable, and never behind the checkpoint
    assert steps_done(killed) >= resumed_at


@pytest.mark.timeout(400)
def test_a_rank_that_hangs_makes_every_rank_print_its_stack(hung: Job) -> None:
    (resumed_at,) = map(int, re.findall(r"resumed after step (\d+) from", hung.said))
    check_hang(hung, 1, f"no step for 6 s, {resumed_at + 14} steps done", "in loss")
    assert steps_done(hung.path) >= last_good_step(hung.path)


@pytest.mark.timeout(400)
def test_a_rank_that_raises_ends_the_job_in_seconds(hung: Job) -> None:
    """The run goes on once more, without gap or doubled step."""
    began, resumed_at = time.time(), last_good_step(hung.path)
    job = Job(hung.path, RANKS, ENDLESS, [f"raise=1:{resumed_at + 3}"])
    check_error(job, began)
    assert f"resumed after step {resumed_at} from" in job.said
    with RunReader(job.path) as reader:
        assert reader.steps()["step"].tolist() == list(range(1, resumed_at + 3))
        assert len(reader.segments()["step"]) == 3


@pytest.mark.long("`make test` has a rank that raises in Ok-Topk")
@pytest.mark.timeout(400)
def test_a_rank_that_raises_under_overlap_ends_the_job_in_seconds(tmp_path: Path) -> None:
    began, settings = time.time(), ["reduction.method=dense", "reduction.overlap=true"]
    check_error(Job(tmp_path / "run.h5", RANKS, [*SLOW[0], *settings], ["raise=1:3"]), began)


def check_error(job: Job, began: float) -> None:
    assert job.wait() not in (0, 2, 75), job.said
    ended, wrote = time.time(), job.path.stat().st_mtime
    assert ended - wrote < max(DEADLINE, wrote - began)
    assert "Traceback (most recent call last)" in job.said
    assert "RuntimeError: the disk of this rank is on fire" in job.said
    with RunReader(job.path) as reader:
        assert reader.status != "complete"


@WAITS
@pytest.mark.timeout(400)
def test_a_stopped_rank_is_found_by_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    job = Job(path, RANKS, [*SLOW[0], f"run.watchdog={WATCHDOG}"], SLOW[1])
    job.wait_for_step(15)
    stopped = job.rank_processes()[0]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert job.wait() not in (0, 2, 75), job.said
    assert time.monotonic() - began < WATCHDOG + max(2 * DEADLINE, began - job.began)
    assert_gone(job, time.monotonic() + DEADLINE)
    told = [
        rank for rank in range(RANKS) if f"rank {rank} of {RANKS}: no step for {WATCHDOG:g} s" in job.said
    ]
    # the one that was stopped may tell too, once it is woken to be ended
    assert len(told) >= RANKS - 1
    assert 'File "' in job.said
    resumed_at = last_good_step(path)
    assert resumed_at >= 10
    job = Job(path, RANKS)
    assert job.wait() == 0, job.said
    assert f"resumed after step {resumed_at} from" in job.said


@WAITS
@pytest.mark.timeout(400)
def test_a_rank_that_hangs_at_the_end_is_told_so(tmp_path: Path) -> None:
    job = Job(tmp_path / "run.h5", RANKS, [f"run.watchdog_around={WATCHDOG}"], ["hang=0:close"])
    check_hang(job, 0, "ending for 6 s, 60 steps done", "in __exit__")


def check_hang(job: Job, rank: int, told: str, where: str) -> None:
    """The watchdog ends the job; every rank says so, and the one that hangs where."""
    assert job.wait() not in (0, 1, 2, 75), job.said
    for each in range(RANKS):
        assert f"rank {each} of {RANKS}: {told}" in job.said
    stack = job.said.split(f"rank {rank} of {RANKS}: {told}")[1].split(" steps done")[0]
    assert "tiny_job.py" in stack
    assert "in stand_still" in stack
    assert where in stack
    assert_gone(job, time.monotonic() + DEADLINE)


@WAITS
@pytest.mark.timeout(400)
def test_a_late_last_checkpoint_is_an_error_and_no_hang(tmp_path: Path) -> None:
    settings = ["checkpoint.every_steps=0", f"run.watchdog={WATCHDOG}"]
    job = Job(tmp_path / "run.h5", RANKS, settings, ["hang=1:write"])
    assert job.wait() == 1, job.said
    assert "the checkpoint of step 60 could not be written" in job.said
    assert f"rank 1: not written within {WATCHDOG:g} s" in job.said
    assert "the innermost call" not in job.said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
        )
    except OSError:
        pytest.skip("there is no mount")
    if mounted.returncode:
        pytest.skip("a small tmpfs can only be mounted as root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@DISK
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run_file_too", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint_intact(
    tmp_path: Path, small_disk: Path, run_file_too: bool
) -> None:
    path = (small_disk if run_file_too else tmp_path) / "run.h5"
    folder = small_disk / "run.checkpoints"
    settings = [f"checkpoint.folder={folder}", "training.steps=3000", "training.eval_every=500"]
    job = Job(path, RANKS, [*settings, "checkpoint.keep=1000"], log=tmp_path / "log")
    assert job.wait() == 1, job.said
    assert "No space left on device" in job.said
    assert re.search(
        r"the checkpoint of step \d+ could not be written to|run file \S+ cannot be written", job.said
    )
    assert "Traceback" not in job.said
    if run_file_too:
        path.with_suffix(".checkpoints").mkdir(exist_ok=True)
    sets = files.list_sets(folder)
    assert len(sets) >= 2
    resumed_at = int(sets[0].name.removeprefix("step-"))
    assert steps_done(path) >= resumed_at
    # room again
    for old in sets[2:]:
        files.shutil.rmtree(old)
    job = Job(path, RANKS, [*settings, "checkpoint.every_steps=500"], log=tmp_path / "log2")
    assert job.wait() == 0, job.said
    assert f"resumed after step {resumed_at} from" in job.said
    assert steps_done(path) == 3000


@DISK
@pytest.mark.timeout(400)
def test_a_lost_file_system_stops_the_run(tmp_path: Path) -> None:
    path, folder = tmp_path / "run.h5", tmp_path / "shared" / "checkpoints"
    job = Job(path, RANKS, [*SLOW[0], f"checkpoint.folder={folder}", "training.steps=5000"], SLOW[1])
    job.wait_for_step(15)
    folder.parent.rename(tmp_path / "gone")
    assert job.wait() == 1, job.said
    assert "could not be written to" in job.said
    assert "Traceback" not in job.said
    assert len(files.list_sets(tmp_path / "gone" / "checkpoints")) >= 1
