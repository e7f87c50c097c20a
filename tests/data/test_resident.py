"""Batches out of a device's memory: the bytes that the host's loaders give, on the host's own memory as well as on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.images.dataset import Augment, DataError, ImageSet, channel_statistics
from data.images.loader import EvaluationLoader, TrainingLoader
from data.images.resident import BLOCK, ResidentEvaluationLoader, ResidentTrainingLoader

PLACES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def image_set(count: int, height: int = 8, width: int = 6) -> ImageSet:
    random = np.random.default_rng(count)
    images = random.integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    mean, std = channel_statistics(images)
    return ImageSet(images, np.arange(count, dtype=np.int64) % 4, mean, std, ("a", "b", "c", "d"))


def same(mine: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one.cpu(), other)
        for one, other in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("augment", [None, Augment(0, True), Augment(2, False), Augment(3, True)])
@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_training_batches_are_those_of_the_loader_in_any_order(
    batch_size: int, augment: Augment | None, place: str
) -> None:
    images = image_set(123)
    for rank in range(2):
        loader = TrainingLoader(images, batch_size=batch_size, rank=rank, size=2, seed=9, augment=augment)
        resident = ResidentTrainingLoader(loader, torch.device(place))
        assert resident.steps_per_epoch == loader.steps_per_epoch
        for epoch in (0, 1, 5, 0):
            pairs = zip(resident.epoch(epoch), loader.epoch(epoch), strict=True)
            assert all(same(mine, theirs) for mine, theirs in pairs)
        last = loader.steps_per_epoch - 1
        assert same(resident.batch(3, last), loader.batch(3, last))
        assert same(next(resident.epoch(4, last)), loader.batch(4, last))


def test_blocks_of_batches_change_nothing() -> None:
    images = image_set(2 * BLOCK // 64 * 64 + 1000, height=2, width=2)
    loader = TrainingLoader(images, batch_size=64, rank=0, size=1, seed=0, augment=Augment(1, True))
    resident = ResidentTrainingLoader(loader, torch.device("cpu"))
    assert resident.steps_per_epoch > 2 * BLOCK // 64
    for step in (0, BLOCK // 64 - 1, BLOCK // 64, resident.steps_per_epoch - 1, 3):
        assert same(resident.batch(0, step), loader.batch(0, step))
    for step in (-1, resident.steps_per_epoch):
        with pytest.raises(ValueError, match=rf"step {step} is not in \[0, {resident.steps_per_epoch}\)"):
            resident.batch(0, step)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [1, 2, 50])
def test_evaluation_batches_are_those_of_the_loader(count: int, place: str) -> None:
    for rank in range(3):
        loader = EvaluationLoader(image_set(count), batch_size=7, rank=rank, size=3)
        resident = ResidentEvaluationLoader(loader, torch.device(place))
        pairs = list(zip(resident, loader, strict=True))
        assert len(pairs) == len(list(loader))
        assert all(same(mine, theirs) for mine, theirs in pairs)


def test_channels_last_batches_hold_the_same_values() -> None:
    loader = TrainingLoader(image_set(40), batch_size=8, rank=0, size=1, seed=1, augment=Augment(2, True))
    resident = ResidentTrainingLoader(loader, torch.device("cpu"), torch.channels_last)
    images, _ = batch = resident.batch(0, 2)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert same(batch, loader.batch(0, 2))
    held_out = EvaluationLoader(image_set(40), batch_size=8, rank=0, size=1)
    images, _ = next(iter(ResidentEvaluationLoader(held_out, torch.device("cpu"), torch.channels_last)))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_read_only_memory_map_is_taken(tmp_path: object) -> None:
    images = image_set(20)
    path = f"{tmp_path}/images"
    images.images.tofile(path)
    mapped = ImageSet(
        np.memmap(path, np.uint8, "r", 0, images.images.shape),
        images.labels,
        images.mean,
        images.std,
        images.classes,
    )
    loader = TrainingLoader(mapped, batch_size=5, rank=0, size=1, seed=1)
    assert same(ResidentTrainingLoader(loader, torch.device("cpu")).batch(0, 1), loader.batch(0, 1))


def test_images_that_do_not_fit_are_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **keys: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    loader = TrainingLoader(image_set(20), batch_size=5, rank=0, size=1, seed=1)
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(DataError, match="20 images of 0.0 GB do not fit on cpu: no room"):
        ResidentTrainingLoader(loader, torch.device("cpu"))
