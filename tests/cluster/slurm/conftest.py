"""A Slurm for the tests of this folder, and jobs in it."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

from oktopk.launch import launch_environment, mpiexec_flavour

ROOT = Path(__file__).parents[3]
LAB = Path(__file__).parent / "lab.sh"
# Jobs share two cores with whatever else runs.
PATIENCE = 180.0


class Slurm:
    """A running Slurm.

    Attributes:
        folder: where outputs and run files of a test go.
    """

    def __init__(self, configuration: Path) -> None:
        self.folder = Path()
        mpiexec = Path(sys.executable).parent / "mpiexec"
        flavour = mpiexec_flavour(str(mpiexec)) if mpiexec.exists() else "unknown"
        # four nodes of two cores are more than this machine has
        self._environment = {
            **launch_environment(64, flavour, cores=1),
            "SLURM_CONF": str(configuration),
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OKTOPK_SITE": str(configuration.with_name("site.sh")),
        }
        self._site = (ROOT / "jobs" / "cluster" / "site.sh").read_text()

    def call(self, *words: str, may_fail: bool = False) -> str:
        done = subprocess.run(
            words, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert may_fail or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def shell(self, line: str, folder: Path, *, terminal: bool = False) -> str:
        """What a command prints that a user types in a checkout of his own, with its own site.sh."""
        environment = {name: value for name, value in self._environment.items() if name != "OKTOPK_SITE"}
        reader, writer = os.openpty() if terminal else os.pipe()
        with subprocess.Popen(
            line,
            shell=True,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
        ) as process:
            os.close(writer)
            said = b"".join(iter(lambda: _read(reader), b"")).decode()
        os.close(reader)
        assert process.returncode == 0, f"{line}: {said}"
        return said

    def submit(self, *words: str, launcher: str = "srun-pmix") -> str:
        """Queue a batch script by jobs/cluster/submit.sh; returns its number."""
        site = self._site.replace("LAUNCHER=auto", f"LAUNCHER={launcher}").replace(
            "PYTHON=.venv/bin/python", f"PYTHON={sys.executable}"
        )
        site = site.replace("RUNS=runs", f"RUNS={self.folder}")
        Path(self._environment["OKTOPK_SITE"]).write_text(site)
        said = self.call("jobs/cluster/submit.sh", f"--output={self.folder}/%A_%a.out", *words)
        found = re.fullmatch(r"Submitted batch job (\d+)", said)
        assert found, said
        return found[1]

    def fact(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job))
        assert found, name
        return found[1]

    def output(self, job: str) -> str:
        """What a job printed, all its starts one after the other."""
        index = re.fullmatch(r"(\d+)_(\d+)", job)
        name = f"{job}.out" if index else f"{job}_4294967294.out"
        path = self.folder / name
        return path.read_text().replace("\r", "\n") if path.exists() else ""

    def log(self, job: str) -> str:
        """What the controller noted of a job."""
        lines = Path(self._environment["SLURM_CONF"]).with_name("log").joinpath("slurmctld.log").read_text()
        number = job.partition("_")[0]
        return "\n".join(line for line in lines.splitlines() if re.search(rf"\bJobId={number}(?!\d)", line))

    def wait_for(self, job: str, *states: str) -> str:
        """Return when the job is in one of the states; one that is queued again is started as soon as it can be.

        Left to itself it would wait for two minutes, by when what its steps leave on the nodes is gone.
        """
        end = time.monotonic() + PATIENCE
        while True:
            state = self.fact(job, "JobState")
            if state in states:
                return state
            if state == "PENDING" and self.fact(job, "Restarts") != "0" and not steps_left(job):
                # a node tells the new credential from the revoked one by the second in which it was made
                time.sleep(1.1)
                # may have started meanwhile
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now", may_fail=True)
            over = state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert not over, f"job {job} is {state}:\n{self.output(job)}\n{self.log(job)}"
            assert time.monotonic() < end, f"job {job} is {state} after {PATIENCE} s:\n{self.output(job)}"
            time.sleep(0.3)

    def complete(self, job: str) -> str:
        """The output of a job that must succeed."""
        self.wait_for(job, "COMPLETED")
        return self.output(job)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # how a terminal says that nobody writes any more
        return b""


def steps_left(job: str) -> bool:
    """Whether a step of the job is still being cleared away; with the same number, a new one could not start."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"slurmstepd: [{job}.".encode() in (folder / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def leave_in_order(number: int, frame: FrameType | None) -> NoReturn:
    """Let a SIGTERM end the tests as their end does: the lab's daemons, in sessions of their own, must not outlive them."""
    signal.signal(number, signal.SIG_IGN)
    pytest.exit(signal.Signals(number).name, returncode=128 + number)


def free_ports(count: int) -> int:
    """The first of some ports that nobody listens on."""
    while True:
        first = random.randrange(20000, 30000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@pytest.fixture(scope="session")
def lab() -> Iterator[Slurm]:
    # not pytest's own folder: the socket's path must be short
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        up = [str(LAB), "up", folder, str(free_ports(5))]
        signal.signal(signal.SIGTERM, leave_in_order)
        try:
            subprocess.run(up, check=True, timeout=120, stdin=subprocess.DEVNULL, env=dict(os.environ))
            yield Slurm(Path(folder) / "slurm.conf")
        finally:
            subprocess.run([str(LAB), "down", folder], check=False, timeout=60)


@pytest.fixture
def slurm(lab: Slurm, tmp_path: Path) -> Iterator[Slurm]:
    lab.folder = tmp_path
    yield lab
    subprocess.run(
        ["scancel", "--user=root"], env=lab._environment, capture_output=True, timeout=60, check=False
    )
    # a step that is left behind would outlive the lab
    end = time.monotonic() + 30
    while lab.call("squeue", "--noheader") and time.monotonic() < end:
        time.sleep(0.2)
