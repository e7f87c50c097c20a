"""The watchdog ends a process that hangs whatever else is broken, and none that only stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from jobs.restart.signals import HUNG_STATUS
from oktopk.launch import launch_environment

HANG = """
import os, sys, time
from mpi4py import MPI
from jobs.restart import signals as module
from jobs.restart.signals import Phase, Watchdog
module.GRACE = 1.5
{first}
with Watchdog(MPI.COMM_WORLD, step={step}, around={around}) as watchdog:
    print("up", flush=True)
    {then}
"""


def start(first: str, then: str, step: float = 0.5, around: float = 2.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HANG.format(first=first, then=then, step=step, around=around)],
        env=launch_environment(1, "unknown"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "first",
    [
        "",
        "full = os.pipe()[1]; os.set_blocking(full, False); os.write(full, bytes(1 << 20)); "
        "os.set_blocking(full, True); os.dup2(full, 2)",
    ],
)
def test_a_hang_ends_without_a_place_to_tell(first: str) -> None:
    process = start(first, "watchdog.enter(Phase.STEPPING); time.sleep(60)")
    said = process.communicate(timeout=150)[1]
    # 1: even MPI's own abort waited for stderr
    assert process.returncode in ((1, HUNG_STATUS) if "dup2" in first else (HUNG_STATUS,)), said
    if first == "":
        assert "rank 0 of 1: no step for 0.5 s, 0 steps done" in said
        assert 'File "<string>"' in said


def test_an_evaluation_may_take_longer_than_a_step() -> None:
    # it leaves by the longer limit: a process may be slow to end
    beyond = (
        "watchdog.enter(Phase.EVALUATING); time.sleep(1.2); watchdog.tick(2); watchdog.enter(Phase.ENDING)"
    )
    process = start("", f"watchdog.tick(1); {beyond}", around=20.0)
    said = process.communicate(timeout=150)[1]
    assert (process.returncode, said) == (0, "")
    process = start("", "watchdog.tick(1); watchdog.enter(Phase.EVALUATING); time.sleep(60)")
    said = process.communicate(timeout=150)[1]
    assert process.returncode == HUNG_STATUS
    assert "evaluating for 2 s, 1 steps done" in said


def test_a_process_that_was_suspended_goes_on() -> None:
    # at what has no steps that would show that it moves
    process = start("", "time.sleep(0.5)", around=3.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(process.pid, signal.SIGCONT)
    said = process.communicate(timeout=150)[1]
    assert (process.returncode, said) == (0, "")
