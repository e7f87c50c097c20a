"""Starting, disturbing and comparing runs of tests.tiny_job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from jobs.restart import files
from jobs.run.reader import RunReader
from oktopk.launch import mpiexec_command

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "jobs" / "configs" / "digits.toml"
SETTINGS = (
    "training.batch_size=8",
    "training.steps=60",
    "training.eval_every=20",
    "reduction.density=0.05",
    "reduction.threshold_interval=8",
    "reduction.boundary_interval=16",
    "checkpoint.every_steps=10",
    "run.watchdog=60",
)


class Job:
    """A job of several ranks that has been started.

    Args:
        path: of the run file.
        ranks: how many.
        settings: overrides.
        faults: see tests.tiny_job.
        log: where its output goes; default: beside the run file.
    """

    def __init__(
        self,
        path: Path,
        ranks: int,
        settings: Sequence[str] = (),
        faults: Sequence[str] = (),
        *,
        log: Path | None = None,
    ) -> None:
        overrides = [*SETTINGS, f"run.file={path}", *settings]
        words = ["-m", "tests.tiny_job", str(CONFIG), "--set", *overrides, "--", *faults]
        command, environment = mpiexec_command(ranks, words)
        self.path, self.ranks, self.began = path, ranks, time.monotonic()
        log = log or path.with_suffix(f".{time.monotonic_ns()}.log")
        self._before = file_identity(path)
        self._log = open(log, "w+", encoding="utf-8")  # noqa: SIM115 - as long as the job
        self._process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def wait(self, seconds: float = 240.0) -> int:
        """The exit status; a job that takes longer is ended and fails the test."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in self.rank_processes():
                os.kill(pid, signal.SIGKILL)
            self._process.kill()
            raise AssertionError(f"the job did not end in {seconds} s:\n{self.said}") from None

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def launcher(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        """All that the job printed so far."""
        self._log.flush()
        return Path(self._log.name).read_text(encoding="utf-8").replace("\r", "\n")

    def rank_processes(self) -> list[int]:
        """Process ids of the ranks, in no order."""
        return rank_processes(self.path)

    def wait_for_step(self, step: int, seconds: float = 240.0) -> None:
        """Return when this job's run file has that many steps."""
        end = time.monotonic() + seconds
        while file_identity(self.path) == self._before or steps_done(self.path) < step:
            assert self.running, f"the job ended before step {step}:\n{self.said}"
            assert time.monotonic() < end, f"no step {step} in {seconds} s:\n{self.said}"
            time.sleep(0.05)


def rank_processes(path: Path) -> list[int]:
    """Process ids of the ranks of the run with this file, in no order."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
        except OSError:
            continue
        # a launcher has the same words behind its own
        if f"run.file={path}".encode() in words and b"python" in Path(words[0].decode()).name.encode():
            found.append(int(folder.name))
    return found


def file_identity(path: Path) -> int:
    """Which file it is, 0 for none: a run that continues writes a new one."""
    return path.stat().st_ino if path.exists() else 0


def steps_done(path: Path) -> int:
    """Steps in a run file, 0 if there is none."""
    if not path.exists():
        return 0
    with RunReader(path) as reader:
        return len(reader.steps()["step"])


def checkpoints(path: Path) -> list[Path]:
    """The sets of a run, newest first."""
    return files.list_sets(path.with_suffix(".checkpoints"))


def forget_the_end(path: Path) -> int:
    """Leave of a complete run what its last checkpoint but one holds; returns the step of that."""
    path.unlink()
    newest, before = files.list_sets(path.with_suffix(".checkpoints"))[:2]
    shutil.rmtree(newest)
    return int(before.name.removeprefix("step-"))


def last_good_step(path: Path) -> int:
    """The step of the newest set, after reading every set through: none may be unreadable."""
    newest = 0
    for found in checkpoints(path):
        manifest = files.read_manifest(found, {})
        for name in manifest.files:
            files.check_part(found / name, manifest)
        newest = max(newest, manifest.step)
    return newest


def assert_same_outcome(one: Path, other: Path, same_hosts: bool = True) -> None:
    """The last checkpoints and the run files of two runs are equal bit for bit, times apart.

    Args:
        same_hosts: the ranks were dealt out to hosts alike.
    """
    apart = ("seconds", "elapsed", *([] if same_hosts else ["bytes_between"]))
    sets = [checkpoints(path)[0] for path in (one, other)]
    assert sets[0].name == sets[1].name
    names = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in sets]
    assert names[0] == names[1]
    for name in names[0]:
        saved, other_saved = (load_file(folder / name) for folder in sets)
        assert saved.keys() == other_saved.keys()
        for tensor, value in saved.items():
            assert value.numpy().tobytes() == other_saved[tensor].numpy().tobytes(), f"{name}: {tensor}"
    with RunReader(one) as reader, RunReader(other) as other_reader:
        for a, b in (
            (reader.steps(), other_reader.steps()),
            (reader.evaluations(), other_reader.evaluations()),
        ):
            assert a.keys() == b.keys()
            for column in a:
                if not column.startswith(apart):
                    assert np.array_equal(a[column].view("u1"), b[column].view("u1")), column
        assert reader.steps()["step"].tolist() == list(range(1, len(reader.steps()["step"]) + 1))
        assert reader.status == other_reader.status == "complete"
