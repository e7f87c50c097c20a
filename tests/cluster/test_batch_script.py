"""What jobs/cluster/batch.sh makes of how the ranks end, without a Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def leave_with(
    folder: Path,
    mpiexec: str,
    path: str = "",
    launcher: str = "mpiexec",
    action: str = "run_ranks -m jobs.train",
) -> int:
    """The status of a batch script whose launcher is `mpiexec`; what it says is in the file "said"."""
    site = folder / "site.sh"
    site.write_text(
        f"load_modules() {{ :; }}\nCONTAINER=()\nPYTHON=python3\nMPIEXEC={mpiexec}\nLAUNCHER={launcher}\n"
        f"RUNS={folder}\nGPUS_PER_RANK=0\n"
    )
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}
    words = ["bash", "-c", "export SCRIPT=$$; source jobs/cluster/batch.sh; " + action]
    environment = {**os.environ, **slurm, "OKTOPK_SITE": str(site), "SLURM_JOB_NODELIST": "n1"}
    environment["PATH"] = f"{path}:{environment['PATH']}"
    with open(folder / "said", "w") as said:
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=said, stderr=said, check=False)
    return done.returncode


def test_a_launcher_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    assert leave_with(tmp_path, "/nonexistent") == 127
    assert leave_with(tmp_path, "true") == 0
    assert leave_with(tmp_path, "false") == 1


def program(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("state", "signals", "queued"),
    [
        ("RUNNING None", "", True),
        ("RUNNING None", "USR1", True),
        ("COMPLETING None", "", False),
        ("COMPLETING None", "TERM", False),
        ("COMPLETING None", "USR1 TERM", False),
        ("COMPLETING TimeLimit", "USR1 TERM", True),
        ("COMPLETING TimeLimit", "TERM", True),
    ],
)
def test_a_job_that_was_cancelled_is_not_queued_again(
    tmp_path: Path, state: str, signals: str, queued: bool
) -> None:
    # the launcher signals the batch script, and ends as ranks do that stopped with a checkpoint
    kills = "".join(f"kill -{signal} $SCRIPT; sleep 0.3; " for signal in signals.split())
    ranks = program(tmp_path / "ranks", f"trap '' USR1; sleep 0.3; {kills} exit 75")
    program(tmp_path / "squeue", f"echo {state}")
    program(tmp_path / "scontrol", f"echo $* >{tmp_path}/queued")
    assert leave_with(tmp_path, str(ranks), str(tmp_path)) == 75
    assert (tmp_path / "queued").exists() == queued


@pytest.mark.parametrize("signal", ["USR1", "TERM"])
@pytest.mark.parametrize("works", [True, False])
def test_a_signal_before_the_ranks_start_is_not_lost(tmp_path: Path, signal: str, works: bool) -> None:
    # it comes while the launcher is tried; one that does not work is followed by no other
    status = 0 if works else 1
    tried = (
        f"case $1 in --mpi=list) echo pmix pmi2;; *) echo $* >>{tmp_path}/started; kill -{signal} $SCRIPT;"
    )
    program(tmp_path / "srun", f"{tried} exit {status};; esac")
    program(tmp_path / "squeue", "echo RUNNING None")
    program(tmp_path / "scontrol", f"echo $* >{tmp_path}/queued")
    assert leave_with(tmp_path, "true", str(tmp_path), launcher="auto") == 75
    assert (tmp_path / "queued").read_text() == "requeue 1\n"
    assert len((tmp_path / "started").read_text().splitlines()) == 1
    assert "stopped before its ranks were started: queued again" in (tmp_path / "said").read_text()


@pytest.mark.parametrize("signal", ["USR1", "TERM", "USR2"])
def test_a_launcher_killed_early_queues_the_job_again(tmp_path: Path, signal: str) -> None:
    deaf = program(tmp_path / "deaf", f"sleep 0.2; kill -{signal} $SCRIPT; exec sleep 30")
    program(tmp_path / "squeue", "echo RUNNING None")
    program(tmp_path / "scontrol", f"echo $* >{tmp_path}/queued")
    assert leave_with(tmp_path, str(deaf), str(tmp_path)) == 75
    assert (tmp_path / "queued").read_text() == "requeue 1\n"


def test_ranks_show_their_stacks_when_asked_and_go_on(tmp_path: Path) -> None:
    asks = "while [ $n -lt 2 ]; do kill -USR2 $SCRIPT; sleep 0.3; done"
    # the script may still hand on a signal when enough have come
    ends = "trap '' USR2; echo done"
    ranks = program(tmp_path / "ranks", f"n=0; trap 'n=$((n+1)); echo shown' USR2; {asks}; {ends}")
    assert leave_with(tmp_path, str(ranks)) == 0
    *shown, done = (tmp_path / "said").read_text().split()
    assert (set(shown), done) == ({"shown"}, "done")
    assert len(shown) >= 2
    # while no rank is there it changes nothing
    # it ignores what comes back to it: one that is killed before it listens has the job queued again; and it ends later: of a
    # child that ends while a signal interrupts the wait for it, bash 5.2 loses the status
    tried = (
        "trap '' USR2; case $1 in --mpi=list) echo pmix;; *) kill -USR2 $SCRIPT; sleep 0.5; echo $*;; esac"
    )
    program(tmp_path / "srun", tried)
    assert leave_with(tmp_path, "true", str(tmp_path), launcher="auto") == 0
    assert "-m jobs.train" in (tmp_path / "said").read_text()


def test_a_launcher_that_ends_before_the_training_is_a_failure(tmp_path: Path) -> None:
    # as mpiexec does when it loses a node
    assert leave_with(tmp_path, "true", action="train digits jobs/configs/digits.toml") == 1
    assert "the training did not end" in (tmp_path / "said").read_text()
    ends = program(tmp_path / "ends", 'touch "$OKTOPK_ENDED"')
    for _ in range(2):
        assert leave_with(tmp_path, str(ends), action="train digits jobs/configs/digits.toml") == 0
        assert not list(tmp_path.glob(".ended*"))
