"""Training that is interrupted, damaged or wrong and started again, in one job: what other ranks and files see of it.

What needs processes that die, hang or are started anew is in test_faults.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from jobs.report.summary import read_runs
from jobs.restart import files
from jobs.restart.signals import EXIT_STATUS
from jobs.run.reader import RunReader
from tests.launched import outcome
from tests.tiny_job import run
from tests.tiny_runs import CONFIG, SETTINGS, assert_same_outcome, checkpoints, last_good_step, steps_done

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]


@pytest.fixture
def path(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    return comm.bcast(tmp_path) / "run.h5"


@pytest.fixture(scope="module")
def undisturbed(comm: MPI.Intracomm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = comm.bcast(tmp_path_factory.mktemp("undisturbed")) / "run.h5"
    status, said = train(comm, path, ["run.measure_every=20"])
    assert status == 0 and "60/60" in said and "held-out" in said
    return path


def train(
    comm: MPI.Intracomm, path: Path, settings: Sequence[str] = (), faults: Sequence[str] = ()
) -> tuple[int, str]:
    """The exit status of tests.tiny_job on ranks that are up, and what rank 0 printed; collective."""
    words = [str(CONFIG), "--set", *SETTINGS, f"run.file={path}", *settings, "--", *faults]
    return outcome(comm, lambda: run(words, comm))


def interrupted(comm: MPI.Intracomm, path: Path, name: str = "SIGUSR1", settings: Sequence[str] = ()) -> int:
    """The step after which a signal to the last rank stopped a run."""
    status, said = train(comm, path, settings, [f"{name}={comm.size - 1}:13"])
    assert status == EXIT_STATUS, said
    done = steps_done(path)
    assert 10 < done < 20
    if comm.rank == 0:
        assert f"{name}: stopped after step {done} with a checkpoint" in said
    assert checkpoints(path)[0].name == f"step-{done:08d}"
    with RunReader(path) as reader:
        assert reader.status == "interrupted"
    comm.barrier()
    return done


@pytest.mark.mpi(min_size=2)
def test_a_run_learns_and_keeps_to_the_bound(comm: MPI.Intracomm, undisturbed: Path) -> None:
    (run,) = read_runs([undisturbed])
    assert (run.status, run.count, run.info.ranks, run.info.method) == ("complete", 60, comm.size, "oktopk")
    assert run.steps["step"].tolist() == list(range(1, 61))
    assert run.steps["loss"][-10:].mean() < 0.5 * run.steps["loss"][:10].mean()
    assert run.evaluations["step"].tolist() == [20, 40, 60]
    assert run.evaluations["accuracy"][-1] > 0.9
    rates = run.steps["learning_rate"]
    assert rates.argmax() == 29  # at the end of the warm-up
    assert rates.max() == pytest.approx(0.025)
    assert run.steps["words"].mean() <= run.upper_bound
    assert np.all(run.steps["words_busiest"] >= run.steps["words"])
    assert np.all(run.steps["k"] == run.info.k)
    assert np.all(run.steps["seconds_reduction"] > 0)
    assert {"select", "reduce", "allgather"} <= run.stages.keys()
    stages = np.sum(list(run.stages.values()), axis=0)
    assert stages + run.steps["seconds_rest"] == pytest.approx(run.steps["seconds_reduction"])
    with RunReader(undisturbed) as reader:
        measures, hardware = reader.measures(), json.loads(reader.info.hardware)
    assert measures["step"].tolist() == [20, 40, 60]
    assert np.all((measures["xi"] > 0) & (measures["xi"] < comm.size + 1))
    assert np.all((measures["fill_in"] >= 1) & (measures["fill_in"] < 1.25 * comm.size))
    assert np.all(measures["seconds"] > 0)
    assert hardware["cores"] == os.cpu_count()


def test_a_stopped_run_ends_as_an_undisturbed_one(comm: MPI.Intracomm, path: Path, undisturbed: Path) -> None:
    done = interrupted(comm, path, "SIGTERM")  # those below: SIGUSR1
    status, said = train(comm, path)
    assert status == 0, said
    assert f"resumed after step {done} from" in said
    assert_same_outcome(undisturbed, path)
    with RunReader(path) as reader:
        assert reader.segments()["step"].tolist() == [0, done]


def test_a_complete_run_is_left_alone_another_refused(comm: MPI.Intracomm, undisturbed: Path) -> None:
    before = undisturbed.read_bytes()
    status, said = train(comm, undisturbed)
    assert status == 0
    assert "is complete: nothing to do" in said
    status, said = train(comm, undisturbed, ["optimizer.lr=0.07"])
    assert status == 2
    assert "exists: choose another name" in said
    assert "it is of another run: optimizer.lr: 0.025 there, 0.07 here" in said
    assert undisturbed.read_bytes() == before


def test_a_checkpoint_of_another_run_is_refused_by_name(comm: MPI.Intracomm, path: Path) -> None:
    settings = ["training.steps=5", "training.eval_every=5"]
    assert train(comm, path, settings)[0] == 0
    if comm.rank == 0:
        path.rename(path.with_name("kept.h5"))
    comm.barrier()
    status, said = train(comm, path, [*settings, "training.seed=1"])
    assert status == 2, said
    assert "refused: of another run: training.seed: 0 there, 1 here" in said
    assert "can be used, so the run cannot continue" in said
    assert not path.exists()
    status, said = train(comm, path, settings)
    assert status == 0, said
    assert "resumed after step 5 from" in said


def test_no_usable_checkpoint_stops_the_run_and_destroys_nothing(comm: MPI.Intracomm, path: Path) -> None:
    done = interrupted(comm, path)
    if comm.rank == 0:
        for found in checkpoints(path):
            (found / files.COMMON).unlink()
    comm.barrier()
    status, said = train(comm, path)
    assert status == 2, said
    assert "common.safetensors cannot be read: No such file" in said
    assert "can be used, so the run cannot continue" in said
    assert steps_done(path) == done
    status, said = train(comm, path, ["run.overwrite=true", "training.steps=5"])
    assert status == 0, said
    assert [step.name for step in checkpoints(path)] == ["step-00000005"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("more", [False, True])
def test_a_run_continues_on_another_number_of_ranks(comm: MPI.Intracomm, path: Path, more: bool) -> None:
    ranks = sorted([comm.size - 1, comm.size], reverse=not more)
    some = comm.Split(0 if comm.rank < comm.size - 1 else MPI.UNDEFINED)
    both = ranks[0] * ranks[1]
    per_step = both * max(1, 24 // both)  # other batches, the same samples per step
    settings = ["training.steps=0", "training.epochs=2"]
    for begins, size in zip((True, False), ranks, strict=True):
        among = comm if size == comm.size else some
        batch = f"training.batch_size={per_step // size}"
        if among and begins:
            done = interrupted(among, path, settings=[*settings, batch])
        elif among:
            status, said = train(among, path, [*settings, batch])
            assert status == 0, said
            assert f"{ranks[0]} ranks wrote it and {size} continue: residuals are redistributed" in said
        comm.barrier()
    done = comm.bcast(done if comm.rank == 0 else None)
    if some:
        some.Free()
    with RunReader(path) as reader:
        assert reader.status == "complete"
        assert reader.steps()["step"].tolist() == list(range(1, 51))
        assert reader.segments()["ranks"].tolist() == ranks
        assert reader.steps()["local_exact"][done] == reader.steps()["global_exact"][done] == 1
        assert reader.steps()["loss"][-10:].mean() < 0.5 * reader.steps()["loss"][:10].mean()
        assert reader.evaluations()["accuracy"][-1] > 0.9


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("nan", "gradient + residual is NaN or Inf on rank(s) {}"),
        ("inf", "the loss is NaN or Inf on rank(s) {}: try a smaller optimizer.lr"),  # of finite gradients
    ],
)
def test_what_is_not_finite_leaves_the_last_checkpoint(
    comm: MPI.Intracomm, path: Path, fault: str, told: str
) -> None:
    status, said = train(comm, path, ["training.steps=30"], [f"{fault}={comm.size - 1}:25"])
    assert status == 1, said
    assert said.count(f"step 24: {told.format(comm.size - 1)}") == 1
    # of step 20; or of an earlier one, where the disk was still busy with that of step 10
    good = comm.bcast(last_good_step(path))
    assert 10 <= good <= 24
    if fault == "inf":
        status, said = train(comm, path, ["training.steps=30"])
        assert status == 0, said
        assert f"resumed after step {good} from" in said


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("every_steps", "earliest"), [(0, 25), (10, 15)])
def test_ranks_that_drift_apart_are_found(
    comm: MPI.Intracomm, path: Path, every_steps: int, earliest: int
) -> None:
    settings = ["training.eval_every=60", f"checkpoint.every_steps={every_steps}"]
    status, said = train(comm, path, settings, ["drift=1:15"])
    assert status == 1, said
    steps = [int(step) for step in re.findall(r"parameters differ between ranks after step (\d+): ", said)]
    # a checkpoint waits until the last one is written; the epoch ends with step 25
    assert len(steps) == 1 and earliest <= steps[0] <= 25
    assert last_good_step(path) <= 14


@pytest.mark.parametrize(("nonfinite", "status", "ended"), [("raise", 1, "failed"), ("skip", 0, "complete")])
def test_a_held_out_loss_that_is_nan_is_named(
    comm: MPI.Intracomm, path: Path, nonfinite: str, status: int, ended: str
) -> None:
    """The last step may leave parameters that no further gradient tells of."""
    last = ["training.steps=1", "training.eval_every=1", "optimizer.lr=1e38", "schedule.warmup=0"]
    code, said = train(comm, path, [*last, f"reduction.nonfinite={nonfinite}"])
    assert code == status, said
    assert said.count("jobs.train: the held-out loss after step 1 is nan") == 1
    with RunReader(path) as reader:
        assert reader.status == ended
        assert np.isnan(reader.evaluations()["loss"]).tolist() == [True]
