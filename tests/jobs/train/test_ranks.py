"""Training on GPUs, as it is started: by mpiexec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs.report.summary import read_runs
from tests.devices import gpus
from tests.launched import PATIENCE, run_ranks

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "jobs" / "configs" / "digits.toml"


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
