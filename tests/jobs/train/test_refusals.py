"""What ends jobs.train with one sentence and no traceback: files that it cannot read, replace or write."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from jobs.config.config import Config
from jobs.restart.signals import STOPPING
from jobs.run.file import RunFile
from jobs.train.__main__ import main
from jobs.train.tasks.task import Workload
from tests.jobs.run.test_damage import break_disk
from tests.tiny_job import Tiny
from tests.tiny_runs import CONFIG, SETTINGS


def build(config: Config, *, rank: int, size: int) -> Workload:
    return Tiny(config, rank, {})


def train(path: Path, *settings: str) -> int:
    words = [str(CONFIG), "--set", *SETTINGS, f"run.file={path}", "run.watchdog=0", *settings]
    try:
        return main(words, comm=MPI.COMM_SELF, build=build)
    finally:
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)


def test_what_cannot_be_read_or_replaced_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, pipe = tmp_path / "damaged.h5", tmp_path / "pipe"
    damaged.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(1000))
    os.mkfifo(pipe)
    for path, settings, said in (
        (damaged, [], f"it cannot be continued: {damaged} is not a run file"),
        (pipe, ["run.overwrite=true"], f"run file {pipe} is not a regular file"),
        (Path("a\0b"), [], "run.file = "),
        (tmp_path / "run.h5", ["training.threads=100000000000"], "training.threads = 100000000000: "),
    ):
        assert train(path, *settings) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert said in told[0]
    assert pipe.is_fifo()


def test_what_the_library_refuses_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its own sentence; tests/oktopk/test_kinds_of_replicas.py has what it refuses."""
    settings = ["optimizer.momentum=0", "reduction.sends=updates", "reduction.average=false"]
    assert train(tmp_path / "run.h5", *settings) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "average=False is for sends='gradients'" in told
    assert not (tmp_path / "run.h5").exists()


@pytest.mark.parametrize("method", ["append_steps", "append_evaluation", "close"])
def test_a_broken_disk_ends_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    path, write = tmp_path / "run.h5", getattr(RunFile, method)

    def write_on_broken_disk(file: RunFile, *values: Any, **named: Any) -> None:
        if file._file:
            break_disk(file)
        write(file, *values, **named)

    monkeypatch.setattr(RunFile, method, write_on_broken_disk)
    assert train(path, "training.steps=5") == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jobs.train")]
    assert told == [f"jobs.train: run file {path} cannot be written: Bad file descriptor"]
