"""Training in this process, on one rank."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from jobs.config.file import apply_overrides, read_toml, validate
from jobs.report.summary import read_runs
from jobs.run.reader import RunReader
from jobs.train.__main__ import main
from jobs.train.setup import build_workload
from jobs.train.tasks.task import Workload

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "jobs" / "configs" / "digits.toml"
TINY = ["model.width=0.0625", "training.batch_size=4", "training.eval_every=100"]


def train_alone(path: Path, *overrides: str) -> int:
    return main([str(CONFIG), "--set", *TINY, f"run.file={path}", *overrides], comm=MPI.COMM_SELF)


def test_one_rank_needs_no_mpiexec_and_repeats_itself(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        settings = ["training.steps=6", "data.crop=4", f"training.seed={seed}"]
        assert train_alone(tmp_path / f"{name}.h5", *settings) == 0
    a, b, c = read_runs([tmp_path / f"{name}.h5" for name in "abc"])
    assert a.steps["loss"].tolist() == b.steps["loss"].tolist()
    assert a.evaluations["loss"].tolist() == b.evaluations["loss"].tolist()
    assert a.steps["loss"].tolist() != c.steps["loss"].tolist()
    assert not a.steps["words"].any()


def test_the_run_file_says_what_ran(tmp_path: Path) -> None:
    assert train_alone(tmp_path / "a.h5", "training.steps=2", "reduction.method=dense") == 0
    with RunReader(tmp_path / "a.h5") as reader:
        info, config = reader.info, reader.config
        steps = reader.steps()
    assert (info.method, info.ranks, info.batch_size, info.seed) == ("dense", 1, 4, 0)
    assert info.length == sum(p.numel() for p in _tiny_model().parameters())
    assert info.k == -(-info.length // 50)
    assert config["training"]["steps"] == 2
    assert '"torch": "' in info.versions
    assert '"mpi": "' in info.versions
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?)?", info.commit)
    assert steps["dense"].tolist() == [1, 1]
    assert np.isnan(steps["global_threshold"]).all()
    assert train_alone(tmp_path / "b.h5", "training.steps=1", "run.commit=told") == 0
    assert read_runs([tmp_path / "b.h5"])[0].info.commit == "told"


def _tiny_model() -> torch.nn.Module:
    from models.vgg import VGG16

    return VGG16(width=0.0625)


def test_steps_and_evaluations_follow_the_settings(tmp_path: Path) -> None:
    epoch = 899 // 300
    overrides = ["training.batch_size=300", "training.eval_every=0", "run.flush_every=4"]
    assert train_alone(tmp_path / "a.h5", *overrides, "training.steps=0", "training.epochs=2") == 0
    assert train_alone(tmp_path / "b.h5", *overrides, "training.steps=5", "training.epochs=3") == 0
    a, b = read_runs([tmp_path / "a.h5", tmp_path / "b.h5"])
    assert (a.count, a.evaluations["epoch"].tolist()) == (2 * epoch, [1.0, 2.0])
    assert (b.count, b.evaluations["step"].tolist()) == (5, [epoch, 2 * epoch, 5])


def losses(tmp_path: Path, *overrides: str) -> np.ndarray:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.h5"
    assert train_alone(path, "schedule.warmup=0", "schedule.name=constant", *overrides) == 0
    (run,) = read_runs([path])
    return np.asarray(run.steps["loss"])


def test_accumulated_batches_are_one_step_on_their_mean(tmp_path: Path) -> None:
    still = "optimizer.lr=1e-12"
    single = losses(tmp_path, still, "training.steps=6")
    pairs = losses(tmp_path, still, "training.steps=3", "training.accumulate=2")
    assert pairs == pytest.approx(single.reshape(3, 2).mean(axis=1), rel=1e-5)
    overrides = ["training.batch_size=100", "training.accumulate=3", "training.eval_every=0"]
    path = tmp_path / "epochs.h5"
    assert train_alone(path, *overrides, "training.steps=0", "training.epochs=2") == 0
    (run,) = read_runs([path])
    assert (run.count, run.evaluations["step"].tolist()) == (2 * (8 // 3), [2, 4])
    assert run.evaluations["epoch"].tolist() == [1.0, 2.0]


def test_layout_precision_and_clipping_do_to_losses_what_they_should(tmp_path: Path) -> None:
    plain, last, mixed, still, clipped = (
        losses(tmp_path, "training.steps=3", *setting)
        for setting in (
            [],
            ["training.channels_last=true"],
            ["training.precision=bfloat16"],
            ["optimizer.lr=1e-12"],
            ["optimizer.clip_norm=1e-9"],
        )
    )
    # rounding only
    assert last == pytest.approx(plain, rel=1e-2)
    assert mixed == pytest.approx(plain, rel=0.1)
    assert mixed.tolist() != plain.tolist()
    # a tiny bound on the gradient's norm stops the parameters
    assert clipped == pytest.approx(still, rel=1e-4)
    assert plain != pytest.approx(still, rel=1e-4)


def test_smoothed_labels_are_for_training_alone(tmp_path: Path) -> None:
    def workload(*overrides: str) -> Workload:
        words = ["training.eval_batch_size=1000", *TINY, *overrides]
        return build_workload(validate(apply_overrides(read_toml(CONFIG), words)), rank=0, size=1)

    plain, smoothed = workload(), workload("training.label_smoothing=0.2")
    images, labels = batch = next(plain.batches(0))
    with torch.no_grad():
        shares = plain.model(images).log_softmax(dim=1)
        expected = -0.8 * shares.gather(1, labels[:, None]).mean() - 0.2 * shares.mean()
        plain.model.load_state_dict(smoothed.model.state_dict())  # its statistics have seen a batch
        assert float(smoothed.loss(batch)) == pytest.approx(float(expected), rel=1e-5)
        assert float(plain.loss(batch)) == pytest.approx(
            float(-shares.gather(1, labels[:, None]).mean()), rel=1e-5
        )
    plain.model.load_state_dict(smoothed.model.state_dict())
    assert smoothed.score() == plain.score()


def test_skipped_steps_are_recorded(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e30", "schedule.warmup=0", "reduction.nonfinite=skip", "training.steps=6"]
    assert train_alone(tmp_path / "a.h5", *overrides) == 0
    (run,) = read_runs([tmp_path / "a.h5"])
    assert run.steps["skipped"].tolist()[0] == 0
    assert run.steps["skipped"].sum() > 0
