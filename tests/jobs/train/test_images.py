"""The Vision Transformer as a workload: its configuration, images that are enlarged on the device, and a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from data.images.file import ImageSet
from jobs.config.file import load
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.setup import build_workload
from jobs.train.tasks.images import make_network
from tests.jobs.train.conftest import CONFIGS, Configured, Words


def images(height: int, width: int, classes: int = 10) -> ImageSet:
    pixels = np.zeros((1, 3, height, width), np.uint8)
    names = tuple(map(str, range(classes)))
    return ImageSet(pixels, np.zeros(1, np.int64), (0.5,) * 3, (0.5,) * 3, names, "some")


def test_the_shipped_file_is_of_the_published_network() -> None:
    config = load(CONFIGS / "vit.toml", ["data.path=x.h5"])
    assert (config.data.name, config.data.resize) == ("cifar10", 224)
    with torch.device("meta"):
        network = make_network(config, images(32, 32))
    assert sum(p.numel() for p in network.parameters()) == 305_520_650


def test_images_that_are_no_squares_are_refused(configured: Configured) -> None:
    with pytest.raises(ValueError, match="some: images of 32x40 pixels, but vit takes squares"):
        make_network(configured("vit", "data.resize=0"), images(32, 40))


def test_images_are_enlarged_where_the_network_is(configured: Configured) -> None:
    workload = build_workload(configured("vit", "training.label_smoothing=0.0"), rank=0, size=1)
    batch = next(workload.batches(0))
    assert batch[0].shape == (16, 3, 32, 32)
    seen: list[torch.Tensor] = []
    workload.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    loss = workload.loss(batch)
    workload.score()
    expected = torch.nn.functional.interpolate(batch[0], (48, 48), mode="bilinear", align_corners=False)
    assert torch.equal(seen[0], expected)
    assert {each.shape[2:] for each in seen} == {(48, 48)}
    assert torch.isfinite(loss)


def test_a_small_one_learns_digits(tmp_path: Path, words: Words) -> None:
    given = words("vit", f"run.file={tmp_path / 'run.h5'}", "training.steps=100", "training.eval_every=100")
    assert main([*given, "optimizer.lr=1e-3", "reduction.density=0.2"], comm=MPI.COMM_SELF) == 0
    (run,) = read_runs([tmp_path / "run.h5"])
    assert run.steps["loss"][-5:].mean() < 0.9 * run.steps["loss"][:5].mean()
    assert run.evaluations["accuracy"][-1] > 0.2
    assert run.evaluations["samples"].tolist() == [898]
