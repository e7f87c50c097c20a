"""Training on several ranks, as it is started: by mpiexec."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from jobs.report.summary import read_runs
from jobs.run.reader import RunReader
from tests.devices import gpus
from tests.launched import PATIENCE, run_ranks

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "jobs" / "configs" / "digits.toml"


@pytest.mark.timeout(PATIENCE)
def test_a_training_run_learns_and_keeps_to_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    overrides = [
        "model.width=0.0625",
        "training.steps=120",
        "training.eval_every=60",
        "schedule.warmup=10",
        "optimizer.lr=0.05",
        "run.measure_every=25",
    ]
    done = run_ranks(2, "-m", "jobs.train", str(CONFIG), "--set", f"run.file={path}", *overrides)
    assert done.returncode == 0, done.stderr
    assert "120/120" in done.stderr
    assert "held-out" in done.stderr
    (run,) = read_runs([path])
    assert (run.status, run.count, run.info.ranks, run.info.method) == ("complete", 120, 2, "oktopk")
    assert run.steps["step"].tolist() == list(range(1, 121))
    assert run.steps["loss"][-20:].mean() < 0.3 * run.steps["loss"][:20].mean()
    assert run.evaluations["accuracy"][-1] > 0.8
    assert run.evaluations["samples"].tolist() == [898, 898]
    assert run.steps["words"].mean() <= run.upper_bound
    assert np.all(run.steps["words_busiest"] >= run.steps["words"])
    assert np.all(run.steps["k"] == run.info.k)
    assert np.all(run.steps["seconds_reduction"] > 0)
    assert {"select", "reduce", "allgather"} <= run.stages.keys()
    stages = np.sum(list(run.stages.values()), axis=0)
    assert stages + run.steps["seconds_rest"] == pytest.approx(run.steps["seconds_reduction"])
    assert run.steps["learning_rate"][9] == pytest.approx(0.05)
    with RunReader(path) as reader:
        measures, hardware = reader.measures(), json.loads(reader.info.hardware)
        assert reader.info.command.startswith(f"jobs.train {CONFIG} --set run.file={path}")
    assert measures["step"].tolist() == [25, 50, 75, 100]
    assert np.all(measures["xi"] > 0)
    # below the ranks, as the paper saw, while there is a gradient to speak of: once it vanishes residuals are large beside it
    assert np.all(measures["xi"][:2] < 2)
    assert np.all((measures["fill_in"] > 1) & (measures["fill_in"] < 2 * 1.25))
    assert np.all(measures["seconds"] > 0)
    assert hardware["cores"] == os.cpu_count()


@pytest.mark.skipif(not gpus(), reason="no GPU")
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_train_on_gpus_and_may_share_one(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "run.h5"
    overrides = [
        "training.device=auto",
        "model.width=0.0625",
        "training.steps=240",
        "training.eval_every=120",
        "schedule.warmup=10",
        "optimizer.lr=0.05",
        "data.crop=2",
    ]
    done = run_ranks(ranks, "-m", "jobs.train", str(CONFIG), "--set", f"run.file={path}", *overrides)
    assert done.returncode == 0, done.stderr
    (run,) = read_runs([path])
    assert (run.status, run.count, run.info.ranks) == ("complete", 240, ranks)
    assert '"device": "NVIDIA' in run.info.versions
    assert run.steps["loss"][-20:].mean() < 0.5 * run.steps["loss"][:20].mean()
    assert run.evaluations["samples"].tolist() == [898, 898]
    stages = np.sum(list(run.stages.values()), axis=0)
    assert stages + run.steps["seconds_rest"] == pytest.approx(run.steps["seconds_reduction"])
    assert np.all(np.diff(run.steps["elapsed"]) > -1e-3)
