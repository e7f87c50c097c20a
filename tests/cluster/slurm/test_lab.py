"""The lab itself: nothing of it is left when the tests are ended early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm.conftest import LAB, PATIENCE, ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2 * PATIENCE)]

WAITING = """
import time, pytest
from tests.cluster.slurm.conftest import *
@pytest.mark.timeout(0)
def test_it(slurm):
    job = slurm.call("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1000")
    slurm.wait_for(job, "RUNNING")
    print("RUNNING", flush=True)
    time.sleep(1000)
"""


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name the folder, or have it in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            texts = [
                (process / name).read_bytes() for name in ("cmdline", "environ") if process.name.isdigit()
            ]
        except OSError:
            continue
        if any(str(folder).encode() in text for text in texts):
            found.append(texts[0].replace(b"\0", b" ").decode())
    return found


def test_a_signal_ends_the_tests_and_their_daemons(tmp_path: Path) -> None:
    (tmp_path / "test_waiting.py").write_text(WAITING)
    labs = tmp_path / "t"
    labs.mkdir()
    words = ["-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path / "test_waiting.py")]
    try:
        end_early([sys.executable, *words], labs)
        assert list(labs.glob("slurm-*")) == []
    finally:
        for lab in labs.glob("slurm-*"):
            subprocess.run([str(LAB), "down", str(lab)], check=False, timeout=60)


def end_early(command: list[str], labs: Path) -> None:
    """Start tests that bring up a lab in this folder, and end them by SIGTERM while a job of it runs."""
    environment = {**os.environ, "TMPDIR": str(labs), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        assert any("RUNNING" in line for line in tests.stdout)
        assert any("slurmctld" in words for words in processes_of(labs))
        tests.send_signal(signal.SIGTERM)
        tests.stdout.read()
    assert tests.returncode == 128 + signal.SIGTERM
    end = time.monotonic() + 30
    while left := processes_of(labs):
        assert time.monotonic() < end, left
        time.sleep(0.2)
