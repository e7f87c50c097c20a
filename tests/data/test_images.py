"""Images: standardised and augmented as said, and the same bytes for the same (seed, epoch, step, rank)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError
from data.images.file import ImageSet, channel_statistics
from data.images.loader import Augment, Batch, Pixels
from tests.data.test_loaders import DEVICES, image_set


def whole(images: ImageSet) -> Batch:
    return Pixels(images).cut(np.arange(len(images)))


def test_standardised_images_have_mean_zero_and_variance_one_per_channel() -> None:
    images, labels = whole(image_set(200))
    assert images.dtype == torch.float32
    assert images.shape == (200, 3, 8, 8)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [index % 4 for index in range(200)]
    assert images.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (images.var(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_channel_statistics_equal_those_in_float64() -> None:
    images = np.random.default_rng(1).integers(0, 256, (1203, 2, 5, 7), dtype=np.uint8)
    images[:, 1] //= 3
    mean, std = channel_statistics(images)
    scaled = images / 255.0
    assert np.allclose(mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    assert np.allclose(std, scaled.std(axis=(0, 2, 3)), rtol=1e-9)


def test_a_constant_channel_can_be_divided_by_its_deviation() -> None:
    mean, std = channel_statistics(np.full((3, 1, 2, 2), 77, np.uint8))
    assert mean == (77 / 255,)
    assert std == (1 / 255,)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)
@given(crop=st.integers(0, 4), flip=st.booleans(), seed=st.integers(0, 2**32), count=st.integers(0, 6))
def test_augmented_images_equal_a_loop_over_windows_and_mirrors(
    device: torch.device, crop: int, flip: bool, seed: int, count: int
) -> None:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (7, 2, 9, 8), dtype=np.uint8)
    before, labels = pixels.copy(), np.arange(7, dtype=np.int64)
    # standardised by nothing
    images = ImageSet(pixels, labels, (0.0, 0.0), (1 / 255, 1 / 255), tuple("abcdefg"))
    draws = random.integers(0, 2**64, count, dtype=np.uint64)
    samples = random.integers(0, 7, count)
    resident = Pixels(images, Augment(crop, flip))
    resident.to(device)
    augmented, found_labels = resident.cut(samples, draws)
    assert np.array_equal(pixels, before)
    assert found_labels.tolist() == samples.tolist()
    for image, draw, found in zip(pixels[samples], draws.tolist(), augmented.cpu().numpy(), strict=True):
        top, left = draw % 2**31 % (2 * crop + 1), (draw >> 31) % 2**31 % (2 * crop + 1)
        padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
        window = padded[:, top : top + 9, left : left + 8]
        assert np.array_equal(found, window[..., ::-1] if flip and draw >> 63 else window)


def test_a_sample_is_augmented_anew_in_every_epoch() -> None:
    pixels = Pixels(image_set(1, size=9), Augment(crop=2, flip=True))
    loader = pixels.training(batch_size=1, rank=0, size=1, seed=3)
    assert len({next(loader.epoch(epoch))[0].numpy().tobytes() for epoch in range(20)}) > 5


def test_without_augmentation_the_pixels_are_the_images() -> None:
    images = image_set(20)
    loader = Pixels(images).training(batch_size=4, rank=1, size=2, seed=0)
    pixels, labels = next(loader.epoch(0, 1))
    expected, expected_labels = (each[loader.shards.indices(0, 1).copy()] for each in whole(images))
    assert torch.equal(pixels, expected)
    assert torch.equal(labels, expected_labels)


def test_a_crop_wider_than_half_the_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"crop 5 is not in \[0, 4\]"):
        Pixels(image_set(10), Augment(crop=5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((4, 8, 8), np.uint8)}, r"images uint8\[4, 8, 8\] are not uint8\[count"),
        ({"images": np.zeros((4, 3, 8, 8), np.float32)}, r"images float32\[4, 3, 8, 8\] are not"),
        ({"images": np.zeros((4, 3, 0, 8), np.uint8)}, "are not uint8"),
        ({"labels": np.zeros(3, np.int64)}, r"labels int64\[3\] are not int64\[4\]"),
        ({"labels": np.zeros(4, np.int32)}, r"labels int32\[4\] are not int64\[4\]"),
        ({"labels": np.array([0, 1, 4, 9])}, r"label 4 of record 2 is not in \[0, 3\]"),
        ({"labels": np.array([0, -1, 0, 0])}, r"label -1 of record 1 is not in \[0, 3\]"),
        ({"classes": ()}, "0 classes, not at least 1"),
        ({"mean": (0.5,)}, r"mean \(0.5,\) is not one finite number for each of 3 channels"),
        ({"mean": (0.5, 0.5, float("nan"))}, "is not one finite number"),
        ({"std": (0.5, 0.0, 0.5)}, "is not one positive number for each of 3 channels"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    fields = {
        "images": np.zeros((4, 3, 8, 8), np.uint8),
        "labels": np.zeros(4, np.int64),
        "mean": (0.5,) * 3,
        "std": (0.2,) * 3,
        "classes": ("a", "b", "c", "d"),
    }
    with pytest.raises(DataError, match=message):
        ImageSet(**(fields | change))  # type: ignore[arg-type]
