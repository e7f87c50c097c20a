"""The Vision Transformer as a workload: its configuration, images that are enlarged on the device, and a run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from data.images.file import ImageSet
from jobs.config.file import ConfigError, apply_overrides, load, read_toml, validate
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.setup import build_workload
from jobs.train.tasks.images import build_model
from jobs.train.tasks.task import WorkloadError

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "vit.toml"
SMALL = [
    "model.layers=2",
    "model.hidden=64",
    "model.patch=8",
    "data.classes=4",
    "data.samples=320",
    "data.resize=48",
    "training.batch_size=16",
]


def images(height: int, width: int, classes: int = 10) -> ImageSet:
    pixels = np.zeros((1, 3, height, width), np.uint8)
    names = tuple(map(str, range(classes)))
    return ImageSet(pixels, np.zeros(1, np.int64), (0.5,) * 3, (0.5,) * 3, names, "some")


def test_the_shipped_file_is_of_the_published_network_on_1000_classes() -> None:
    config = load(CONFIG)
    assert (config.data.name, config.data.classes, config.data.resize) == ("synthetic", 1000, 224)
    with torch.device("meta"):
        network = build_model(config, images(32, 32, config.data.classes))
    assert sum(p.numel() for p in network.parameters()) == 306_535_400
    assert load(CONFIG, ["data.name=cifar10", "data.path=x.h5"]).data.resize == 224


def test_images_are_enlarged_where_the_network_is() -> None:
    config = validate(apply_overrides(read_toml(CONFIG), [*SMALL, "training.label_smoothing=0.0"]))
    workload = build_workload(config, rank=0, size=1)
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


def test_a_small_one_learns_images_that_are_made_up(tmp_path: Path) -> None:
    words = [str(CONFIG), "--set", *SMALL, f"run.file={tmp_path / 'run.h5'}", "training.device=cpu"]
    words += ["training.steps=60", "training.eval_every=60", "optimizer.lr=3e-3", "reduction.density=0.1"]
    assert main(words, comm=MPI.COMM_SELF) == 0
    (run,) = read_runs([tmp_path / "run.h5"])
    assert run.evaluations["accuracy"][-1] > 0.5
    assert run.evaluations["samples"].tolist() == [64]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=x.h5"], "path is 'x.h5', but synthetic images are read from no file: set data.name to"),
        (["model.patch=0"], "model.patch = 0: Input should be greater than or equal to 1"),
        (["data.resize=2000"], "data.resize = 2000: Input should be less than or equal to 1024"),
    ],
)
def test_settings_of_another_network_or_data_set_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(CONFIG, [*SMALL, *overrides])


def test_images_that_it_does_not_take_are_named() -> None:
    config = load(CONFIG, [*SMALL, "data.resize=0"])
    with pytest.raises(WorkloadError, match="some: images of 32x40 pixels, but vit takes squares"):
        build_model(config, images(32, 40))
    with pytest.raises(WorkloadError, match="model: image 36 is not a positive multiple of the patch's 8"):
        build_model(config, images(36, 36))
