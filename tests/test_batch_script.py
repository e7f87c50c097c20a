"""What jobs/batch.sh makes of how the ranks end, without a Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def leave_with(folder: Path, mpiexec: str, path: str = "") -> int:
    """The status of a batch script whose launcher is `mpiexec`."""
    site = folder / "site.sh"
    site.write_text(
        f"load_modules() {{ :; }}\nCONTAINER=()\nPYTHON=python3\nMPIEXEC={mpiexec}\nLAUNCHER=mpiexec\n"
        f"RUNS={folder}\nGPUS_PER_RANK=0\n"
    )
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}
    words = ["bash", "-c", "source jobs/batch.sh; run_ranks -m jobs.train"]
    environment = {**os.environ, **slurm, "OKTOPK_SITE": str(site)}
    environment["PATH"] = f"{path}:{environment['PATH']}"
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False).returncode


def test_a_launcher_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    assert leave_with(tmp_path, "/nonexistent") == 127
    assert leave_with(tmp_path, "true") == 0
    assert leave_with(tmp_path, "false") == 1


def program(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("state", "signal", "queued"),
    [
        ("RUNNING", "", True),
        ("COMPLETING", "", False),
        ("COMPLETING", "TERM", False),
        ("COMPLETING", "USR1", True),
    ],
)
def test_a_job_that_was_cancelled_is_not_queued_again(
    tmp_path: Path, state: str, signal: str, queued: bool
) -> None:
    # the launcher signals the batch script, and ends as ranks do that stopped with a checkpoint
    kill = f"kill -{signal} $PPID" if signal else ":"
    ranks = program(tmp_path / "ranks", f"trap '' USR1; sleep 0.3; {kill}; sleep 0.3; exit 75")
    program(tmp_path / "squeue", f"echo {state}")
    program(tmp_path / "scontrol", f"echo $* >{tmp_path}/queued")
    assert leave_with(tmp_path, str(ranks), str(tmp_path)) == 75
    assert (tmp_path / "queued").exists() == queued
