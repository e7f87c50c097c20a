"""Checkpoints of several ranks: agreed on, valid as a whole, found again, and handed on to other numbers of ranks."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from jobs.cluster.agreement import Refused
from jobs.config.sections import CheckpointConfig
from jobs.restart import files
from jobs.restart.checkpoint import Checkpointer, CheckpointError, Due
from jobs.restart.files import Identity
from jobs.restart.resume import Found, find
from oktopk import GradientAllreduce
from oktopk.elastic import inherited_ranks, redistribute

IDENTITY = Identity(model="abc", method="oktopk", length=1000)


@pytest.fixture
def folder(comm: MPI.Intracomm) -> Iterator[Path]:
    """One folder for all ranks."""
    path = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    yield Path(path)
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def checkpointer(comm: MPI.Intracomm, folder: Path | None, **arguments: Any) -> Checkpointer:
    config = CheckpointConfig(
        every_steps=arguments.pop("steps", 0), every_minutes=arguments.pop("minutes", 0.0), keep=2
    )
    made = Checkpointer(comm, folder, IDENTITY, {}, config, patience=30.0, **arguments)
    made.start(0)
    return made


def states(comm: MPI.Intracomm, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"weights": torch.full((10,), float(step))}, {"mine": torch.full((10,), float(comm.rank))}


def run(made: Checkpointer, comm: MPI.Intracomm, steps: int, seconds: float = 0.0) -> list[tuple[int, Due]]:
    """Steps with what is due after each; ends at STOP."""
    done: list[tuple[int, Due]] = []
    for step in range(1, steps + 1):
        time.sleep(seconds)
        due = made.due(step, last=step == steps)
        if due is not Due.NOTHING:
            made.save(step, *states(comm, step), wait=step == steps or due is Due.STOP)
            done.append((step, due))
        if due is Due.STOP:
            break
    made.close()
    return done


def found_set(comm: MPI.Intracomm, folder: Path, say: Callable[[str], object] = print) -> Found:
    """The set to go on from, which must be there."""
    found = find(comm, folder, IDENTITY, say)
    assert found is not None
    return found


@pytest.mark.mpi
def test_sets_are_due_by_steps_and_at_the_end_and_are_found(comm: MPI.Intracomm, folder: Path) -> None:
    saved = run(checkpointer(comm, folder, steps=10), comm, 25, seconds=0.02)
    assert saved[-1] == (25, Due.SAVE)
    assert saved[0] == (10, Due.SAVE)
    assert len({str(theirs) for theirs in comm.allgather(saved)}) == 1
    found = found_set(comm, folder)
    assert (found.step, found.ranks) == (25, comm.size)
    assert found.common()["weights"].tolist() == [25.0] * 10
    assert found.own(comm.rank)["mine"].tolist() == [float(comm.rank)] * 10


@pytest.mark.mpi
def test_sets_are_due_by_rank_0s_clock(comm: MPI.Intracomm, folder: Path) -> None:
    saved = run(checkpointer(comm, folder, minutes=0.2 / 60), comm, 30, seconds=0.03)
    assert len({str(theirs) for theirs in comm.allgather(saved)}) == 1
    assert len(saved) >= 2
    assert all(later - earlier >= 2 for (earlier, _), (later, _) in pairwise(saved[:-1]))


@pytest.mark.mpi
def test_a_signal_on_one_rank_stops_all_at_the_same_step(comm: MPI.Intracomm, folder: Path) -> None:
    received = 0
    made = checkpointer(comm, folder, received=lambda: received)
    for step in range(1, 100):
        received = 10 if comm.rank == comm.size - 1 and step >= 5 else 0
        if made.due(step, last=False) is Due.STOP:
            made.save(step, *states(comm, step), wait=True)
            break
    made.close()
    assert comm.allgather(step) == [6] * comm.size
    assert made.stop_signal == 10
    assert found_set(comm, folder).step == 6


@pytest.mark.mpi
def test_without_a_folder_a_signal_still_stops(comm: MPI.Intracomm) -> None:
    made = checkpointer(comm, None, steps=3, received=lambda: 15 * (comm.rank == 0))
    assert run(made, comm, 20) == [(2, Due.STOP)]


@pytest.mark.mpi
def test_without_a_folder_a_set_is_due_once_an_interval(comm: MPI.Intracomm) -> None:
    made = checkpointer(comm, None, steps=3)
    assert run(made, comm, 10) == [(step, Due.SAVE) for step in (3, 6, 9, 10)]
    saved = run(checkpointer(comm, None, minutes=0.2 / 60), comm, 30, seconds=0.03)
    assert len(saved) >= 2
    assert all(later - earlier >= 2 for (earlier, _), (later, _) in pairwise(saved[:-1]))


@pytest.mark.mpi
def test_writing_that_fails_while_ranks_agree_is_not_taken_for_done(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()

    def write(path: Path, snapshot: object) -> None:
        failing.wait(20.0)
        raise OSError

    made = checkpointer(comm, folder)
    monkeypatch.setattr(files, "write_part", write)
    made.save(1, *states(comm, 1))
    look = made._problem

    def look_and_fail() -> str:
        seen = look()
        failing.set()
        assert made._task is not None
        made._task.wait(20.0)
        return seen

    monkeypatch.setattr(made, "_problem", look_and_fail)
    with pytest.raises(CheckpointError, match=r"of step 1 .* rank 0: OSError\(\)"):
        for step in (2, 3, 4):
            made.due(step, last=False)


@pytest.mark.mpi
def test_a_set_that_cannot_be_written_is_an_error_on_every_rank(comm: MPI.Intracomm, folder: Path) -> None:
    run(checkpointer(comm, folder), comm, 3)
    made = checkpointer(comm, folder, steps=5)
    made.start(3)
    if comm.rank == 0:
        # no folder can be made where a file is
        files.draft_folder(folder, 8).write_text("in the way")
    comm.barrier()
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 8 .* rank 0: .*step-00000008"):
        for step in range(4, 60):
            time.sleep(0.01)
            if made.due(step, last=False) is Due.SAVE:
                made.save(step, *states(comm, step))
    assert found_set(comm, folder).step == 3


@pytest.mark.mpi
def test_a_damaged_part_of_any_rank_makes_all_use_the_set_before(comm: MPI.Intracomm, folder: Path) -> None:
    made = checkpointer(comm, folder)
    for step in (10, 20):
        made.save(step, *states(comm, step), wait=True)
    made.close()
    if comm.rank == comm.size - 1:
        path = files.set_folder(folder, 20) / files.rank_file(comm.rank)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    comm.barrier()
    said: list[str] = []
    assert found_set(comm, folder, said.append).step == 10
    if comm.rank == 0:
        refused, aside = said
        assert f"step-00000020 refused: rank-{comm.size - 1:05d}.safetensors is damaged" in refused
        assert aside.endswith("step-00000020 set aside as step-00000020.refused")


@pytest.mark.mpi
def test_sets_that_were_refused_push_out_none_that_is_written_after_them(
    comm: MPI.Intracomm, folder: Path
) -> None:
    made = checkpointer(comm, folder)
    for step in (10, 20):
        made.save(step, *states(comm, step), wait=True)
    made.close()
    if comm.rank == 0:
        # as many as are kept
        for step in (30, 40):
            shutil.copytree(files.set_folder(folder, 20), files.set_folder(folder, step))
    comm.barrier()
    assert found_set(comm, folder, lambda line: None).step == 20
    made = checkpointer(comm, folder)
    for step in (21, 22, 23):
        made.save(step, *states(comm, step), wait=True)
        # a job that is killed here continues from here
        assert found_set(comm, folder, pytest.fail).step == step
    made.close()
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000022",
        "step-00000023",
        "step-00000030.refused",
        "step-00000040.refused",
    ]


@pytest.mark.mpi
def test_sets_that_are_all_damaged_end_every_rank_and_none_at_all_is_a_start(
    comm: MPI.Intracomm, folder: Path
) -> None:
    assert find(comm, folder / "none", IDENTITY, print) is None
    assert find(comm, folder, IDENTITY, print) is None
    run(checkpointer(comm, folder), comm, 2)
    other = Identity(model="xyz", method="oktopk", length=1000)
    with pytest.raises(Refused, match="no checkpoint in .* can be used"):
        find(comm, folder, other, lambda line: None)


def test_every_saved_rank_is_inherited_once() -> None:
    for saved in range(1, 10):
        for ranks in range(1, 10):
            heirs = [list(inherited_ranks(rank, ranks, saved)) for rank in range(ranks)]
            assert sorted(rank for theirs in heirs for rank in theirs) == list(range(saved))
    with pytest.raises(ValueError, match="rank 4 is not in"):
        inherited_ranks(4, 4, 2)
    with pytest.raises(ValueError, match="at least 1"):
        inherited_ranks(0, 1, 0)


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["oktopk", "topka", "gtopk"])
def test_another_number_of_ranks_keeps_the_sum_of_the_residuals(
    comm: MPI.Intracomm, folder: Path, method: str
) -> None:
    """All ranks save; the first half of them continue, and then all again."""
    length = 1000
    # small integers, so that sums are exact
    random = np.random.default_rng(comm.rank)
    settings: dict[str, Any] = {"density": 0.05, "average": False}
    before = GradientAllreduce(comm, length, method, **settings)
    for _ in range(3):
        before.step(random.integers(-8, 9, length).astype(np.float32))
    saved = before.state_dict()
    total = comm.allreduce(saved["residual"])
    before.close()
    few = max(1, comm.size // 2)
    group = comm.Split(int(comm.rank < few), comm.rank)
    everyone = comm.allgather(saved)
    if comm.rank < few:
        middle = GradientAllreduce(group, length, method, **settings)
        middle.load_state_dict(moved(everyone, group))
        assert np.array_equal(group.allreduce(middle.state_dict()["residual"]), total)
        middle.step(np.zeros(length, np.float32))
        remaining = group.allreduce(middle.state_dict()["residual"])
        assert np.array_equal(remaining + middle.update, total)
        saved = middle.state_dict()
        middle.close()
    fewer = [state for state in comm.allgather(saved if comm.rank < few else None) if state is not None]
    after = GradientAllreduce(comm, length, method, **settings)
    after.load_state_dict(moved(fewer, comm))
    kept = after.state_dict()["residual"]
    kept = np.zeros(length, np.float32) if kept is None else kept
    assert np.array_equal(comm.allreduce(kept), sum(state["residual"] for state in fewer))
    report = after.step(np.ones(length, np.float32))
    assert report.exact or comm.size == 1  # where there is one rank as before, it goes on bit for bit
    after.close()
    group.Free()


def moved(saved: list[dict[str, Any]], comm: MPI.Intracomm) -> dict[str, Any]:
    return redistribute(saved.__getitem__, len(saved), comm.rank, comm.size)


@pytest.mark.mpi
def test_a_set_of_more_ranks_gives_every_reducer_its_share(comm: MPI.Intracomm, folder: Path) -> None:
    made = checkpointer(comm, folder)
    reducer: dict[str, Any] = {
        "residual": np.full(5, 1.0, np.float32),
        "methods": {},
        "last_k": 3,
    }
    made.save(1, {}, {"reducer": reducer}, wait=True)
    made.close()
    path = files.set_folder(folder, 1)
    found = Found(path, 1, comm.size)
    assert found.residuals(0, 1)["reducer"]["residual"].tolist() == [float(comm.size)] * 5
    beyond = found.residuals(comm.size, comm.size + 1)["reducer"]
    assert (beyond["residual"].tolist(), beyond["last_k"]) == ([0.0] * 5, None)
    assert found.residuals(comm.rank, comm.size)["reducer"]["last_k"] == 3
