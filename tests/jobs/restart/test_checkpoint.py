"""Checkpoints of several ranks: agreed on, valid as a whole, and found again."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from jobs.config.sections import CheckpointConfig
from jobs.restart import files
from jobs.restart.checkpoint import Checkpointer, CheckpointError
from jobs.restart.session import Found, find
from jobs.restart.signals import Interrupted, SignalNote, Watchdog

IDENTITY = {"model": "abc", "method": "oktopk", "length": 1000}


@pytest.fixture
def folder(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return comm.bcast(tmp_path)


class Run(Checkpointer):
    """Checkpoints of a run whose steps change no state but their number.

    Attributes:
        signals: what this rank's signals are noted by.
        saved: steps after which checkpoints were taken.
    """

    def __init__(
        self, comm: MPI.Intracomm, folder: Path | None, *, steps: int = 0, minutes: float = 0.0, done: int = 0
    ) -> None:
        due = CheckpointConfig(every_steps=steps, every_minutes=minutes, keep=2)
        watchdog, self.signals = Watchdog(comm, step=30.0, around=0.0), SignalNote()
        super().__init__(comm, folder, IDENTITY | {"config": {}}, due, self.signals, watchdog, done=done)
        self.saved: list[int] = []

    def save(self, done: int, *states: Any, wait: bool = False) -> None:
        self.saved.append(done)
        states = (
            {"weights": torch.full((10,), float(done))},
            {"mine": torch.full((10,), float(self.comm.rank))},
        )
        super().save(done, *states, wait=wait)

    def run(self, steps: range, last: int = 0, seconds: float = 0.0) -> None:
        """Steps with what is due after each."""
        for step in steps:
            time.sleep(seconds)
            self.after_step(step, last=step == last, capture=lambda: ({}, {}), before=lambda: None)

    def save_all(self, *steps: int) -> None:
        """Checkpoints after these steps, each waited for; and the end."""
        for step in steps:
            self.save(step, wait=True)
        self.close()


def found_set(comm: MPI.Intracomm, folder: Path, say: Callable[[str], object] = print) -> Found:
    """The set to go on from, which must be there."""
    found = find(comm, folder, IDENTITY, say, lambda found: None)
    assert found is not None
    return found[0]


@pytest.mark.mpi
def test_sets_are_due_by_steps_and_at_the_end(comm: MPI.Intracomm, folder: Path) -> None:
    made = Run(comm, folder, steps=10)
    made.run(range(1, 26), last=25, seconds=0.02)
    made.close()
    assert (made.saved[0], made.saved[-1]) == (10, 25)
    assert comm.allgather(made.saved) == [made.saved] * comm.size
    found = found_set(comm, folder)
    assert (found.step, found.ranks) == (25, comm.size)
    assert found.common()["weights"].tolist() == [25.0] * 10
    assert found.own(comm.rank)["mine"].tolist() == [float(comm.rank)] * 10


@pytest.mark.mpi
@pytest.mark.parametrize("written", [True, False])
def test_sets_are_due_by_the_clock_once_an_interval(comm: MPI.Intracomm, folder: Path, written: bool) -> None:
    made = Run(comm, folder if written else None, minutes=0.2 / 60)
    made.run(range(1, 31), last=30, seconds=0.03)
    made.close()
    assert comm.allgather(made.saved) == [made.saved] * comm.size
    assert len(made.saved) >= 2
    assert all(later - earlier >= 2 for earlier, later in pairwise(made.saved[:-1]))


@pytest.mark.mpi
@pytest.mark.parametrize("written", [True, False])
def test_a_signal_on_one_rank_stops_all_together(comm: MPI.Intracomm, folder: Path, written: bool) -> None:
    made = Run(comm, folder if written else None, steps=3)
    made.run(range(1, 5))
    made.wait()  # no set is due while one is being written
    made.signals.received = 10 * (comm.rank == comm.size - 1)
    with pytest.raises(Interrupted) as stopped:
        made.run(range(5, 100))
    made.close()
    assert (stopped.value.step, stopped.value.signal_number) == (6, 10)
    assert made.saved == [3, 6]
    if written:
        assert found_set(comm, folder).step == 6


@pytest.mark.mpi
def test_no_set_is_due_while_one_is_being_written(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, write_part = threading.Event(), files.write_part
    monkeypatch.setattr(files, "write_part", lambda *part: free.wait(20.0) and write_part(*part))
    made = Run(comm, folder, steps=2)
    made.run(range(1, 8))
    assert made.saved == [2]
    free.set()
    made.run(range(8, 40), seconds=0.02)
    made.close()
    assert len(made.saved) > 2
    assert comm.allgather(made.saved) == [made.saved] * comm.size


@pytest.mark.mpi
@pytest.mark.parametrize("rank", [0, -1])
def test_writing_that_fails_on_one_rank_is_an_error_everywhere(
    comm: MPI.Intracomm, folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, ended = threading.Event(), threading.Event()

    def write(path: Path, snapshot: Any) -> None:
        (failing if comm.rank == rank % comm.size else ended).wait(20.0)
        raise OSError

    made = Run(comm, folder)
    monkeypatch.setattr(files, "write_part", write)
    made.save(1)
    made.run(range(2, 5))
    failing.set()
    with pytest.raises(CheckpointError, match=r"of step 1 could not be written to .*OSError"):
        made.run(range(5, 500), seconds=0.01)
    ended.set()


@pytest.mark.mpi
def test_refused_sets_push_out_no_later_one(comm: MPI.Intracomm, folder: Path) -> None:
    Run(comm, folder).save_all(10, 20)
    if comm.rank == 0:
        # as many as are kept
        for step in (30, 40):
            shutil.copytree(files.set_folder(folder, 20), files.set_folder(folder, step))
    comm.barrier()
    assert found_set(comm, folder, lambda line: None).step == 20
    for step in (21, 22, 23):
        Run(comm, folder).save_all(step)
        # a job that is killed here continues from here
        assert found_set(comm, folder, pytest.fail).step == step
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000022",
        "step-00000023",
        "step-00000030.refused",
        "step-00000040.refused",
    ]
