"""An experiment that takes seconds: two classes of noise, and what is asked of jobs.experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.images.file import write_image_file
from jobs.experiment.experiments import EXPERIMENTS

VGG = EXPERIMENTS["vgg"]


def write_images(path: Path) -> Path:
    """Two classes that a network tells apart at once: dark images and bright ones."""
    rng = np.random.default_rng(0)
    counts = {"train": 64, "test": 32}
    parts = []
    for split, count in counts.items():
        labels = np.arange(count) % 2
        noise = rng.integers(0, 100, (count, 3, 32, 32))
        parts.append((split, 0, (noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels))
    write_image_file(
        path,
        parts,
        name="shades",
        classes=("dark", "bright"),
        source="a test",
        shape=(3, 32, 32),
        counts=counts,
    )
    return path


def small(tmp_path: Path, *more: str) -> list[str]:
    images = tmp_path / "images.h5"
    tmp_path.mkdir(exist_ok=True)
    if not images.exists():
        write_images(images)
    return [
        *("vgg", "--data", str(images), "-o", str(tmp_path / "out"), "--ranks", "2", "--epochs", "2"),
        *("--seeds", "2", "--methods", "dense", "oktopk", "topka", "--speed-steps", "3", "--no-gpu-methods"),
        *(
            "--set",
            "model.width=0.0625",
            "data.name=prepared",
            "training.batch_size=8",
            "training.device=cpu",
        ),
        *("reduction.dense_warmup_steps=1", "run.measure_every=3", *more),
    ]
