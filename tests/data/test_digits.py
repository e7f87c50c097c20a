"""The digits: all of them, in two parts that share none, the same parts every time."""

import numpy as np
import pytest
from sklearn.datasets import load_digits as load_original_digits

from data.images.digits import load_digits


def test_both_parts_together_are_all_digits_and_share_none() -> None:
    train, test = load_digits()
    assert (len(train), len(test)) == (899, 898)
    assert train.shape == test.shape == (3, 32, 32)
    original = load_original_digits()
    counts = np.bincount(train.labels) + np.bincount(test.labels)
    assert np.array_equal(counts, np.bincount(original.target))
    # The originals are all different, so an image in both parts would be one that was put there twice.
    images = np.concatenate([train.images, test.images])
    assert len({image.tobytes() for image in images}) == len({image.tobytes() for image in original.images})


@pytest.mark.parametrize("held_out", [0.1, 0.5, 0.75])
def test_every_class_is_held_out_in_proportion(held_out: float) -> None:
    train, test = load_digits(8, held_out)
    in_test, in_train = np.bincount(test.labels), np.bincount(train.labels)
    assert np.all(np.abs(in_test - held_out * (in_test + in_train)) <= 0.5)


def test_the_split_is_fixed_by_its_seed() -> None:
    assert np.array_equal(load_digits(8)[0].images, load_digits(8)[0].images)
    assert not np.array_equal(load_digits(8)[0].images, load_digits(8, seed=1)[0].images)


def test_images_are_the_originals_in_full_range_and_equal_channels() -> None:
    train, _ = load_digits(8)
    assert train.images.max() == 255
    assert train.images.min() == 0
    assert np.array_equal(train.images[:, 0], train.images[:, 2])
    originals = {
        np.rint(image * (255 / 16)).astype(np.uint8).tobytes() for image in load_original_digits().images
    }
    assert all(image[0].tobytes() in originals for image in train.images)


def test_a_tiny_part_keeps_one_of_each_class() -> None:
    train, test = load_digits(8, 1e-6)
    assert np.bincount(test.labels).tolist() == [1] * 10
    train, test = load_digits(8, 1 - 1e-6)
    assert np.bincount(train.labels).tolist() == [1] * 10
