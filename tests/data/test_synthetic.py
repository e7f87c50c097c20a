"""Images that are made up: of the classes and sizes asked for, equal on every rank, and of classes that can be told apart."""

import numpy as np
import pytest

from data import DataError
from data.images.loader import Pixels
from data.images.synthetic import load_synthetic


def test_splits_have_all_classes_equally_often_every_time() -> None:
    train, test = load_synthetic(16, classes=5, samples=100, held_out=0.2)
    assert (len(train), len(test), train.shape, len(train.classes)) == (80, 20, (3, 16, 16), 5)
    assert np.bincount(train.labels).tolist() == [16] * 5
    assert np.bincount(test.labels).tolist() == [4] * 5
    assert np.array_equal(train.images, load_synthetic(16, classes=5, samples=100, held_out=0.2)[0].images)
    other, _ = load_synthetic(16, classes=5, samples=100, held_out=0.2, seed=1)
    assert not np.array_equal(train.images, other.images)
    assert len({image.tobytes() for image in (*train.images, *test.images)}) == 100


def test_classes_differ_by_coarse_patches_and_not_single_pixels() -> None:
    train, test = load_synthetic(32, classes=4, samples=800)
    pixels = [Pixels(images).cut(np.arange(len(images)))[0].numpy() for images in (train, test)]
    coarse = [each.reshape(-1, 3, 4, 8, 4, 8).mean(axis=(3, 5)) for each in pixels]

    def accuracy(features: list[np.ndarray]) -> float:
        known, asked = (each.reshape(len(each), -1) for each in features)
        centres = np.stack([known[train.labels == label].mean(axis=0) for label in range(4)])
        nearest = np.square(asked[:, None] - centres).sum(axis=2).argmin(axis=1)
        return float((nearest == test.labels).mean())

    assert accuracy(coarse) > 0.8
    assert accuracy([each[:, :, 5, 5] for each in pixels]) < 0.5


def test_a_split_with_fewer_samples_than_classes_is_refused() -> None:
    with pytest.raises(DataError, match="100 samples, 0.5 of them held out, are not at least one of each"):
        load_synthetic(samples=100, classes=60)
