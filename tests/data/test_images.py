"""Images: standardised and augmented as said, and the same bytes for the same (seed, epoch, step, rank)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError
from data.batches import EpochLoader
from data.images.file import ImageSet, channel_statistics
from data.images.loader import Augment, Batch, Pixels

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    ),
]


def image_set(count: int, seed: int = 0, size: int = 8) -> ImageSet:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    mean, std = channel_statistics(images)
    labels = np.arange(count, dtype=np.int64) % 4
    return ImageSet(images, labels, mean, std, ("a", "b", "c", "d"))


def whole(images: ImageSet) -> Batch:
    return Pixels(images).cut(np.arange(len(images)))


def same(mine: Batch, theirs: Batch) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one.cpu(), other)
        for one, other in zip(mine, theirs, strict=True)
    )


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


def test_every_offset_and_both_directions_occur() -> None:
    draws = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64)
    top, left, mirrored = Augment(crop=2, flip=True).places(draws)
    assert set(zip(top.tolist(), left.tolist(), strict=True)) == {(i, j) for i in range(5) for j in range(5)}
    assert 900 < mirrored.sum() < 1100
    assert not Augment(crop=0, flip=False).places(draws).any()


def loaders(images: ImageSet, size: int, batch_size: int, seed: int = 3) -> list[EpochLoader[Batch]]:
    augment = Augment(crop=2, flip=True)
    return [
        Pixels(images, augment).training(batch_size=batch_size, rank=rank, size=size, seed=seed)
        for rank in range(size)
    ]


def test_a_batch_is_a_function_of_seed_epoch_step_and_rank() -> None:
    images = image_set(64)
    first, again, other = loaders(images, 4, 3), loaders(images, 4, 3), loaders(images, 4, 3, seed=4)
    wanted = {(epoch, step): first[2].batch(epoch, step) for epoch in range(3) for step in range(5)}
    for (epoch, step), (pixels, labels) in reversed(wanted.items()):
        repeated = again[2].batch(epoch, step)
        assert torch.equal(pixels, repeated[0])
        assert torch.equal(labels, repeated[1])
    distinct = [
        first[2].batch(0, 0),
        first[3].batch(0, 0),
        first[2].batch(0, 1),
        first[2].batch(1, 0),
        other[2].batch(0, 0),
    ]
    assert len({pixels.numpy().tobytes() for pixels, _ in distinct}) == 5


def test_another_number_of_ranks_sees_the_same_pixels() -> None:
    images = image_set(64)
    four, one = loaders(images, 4, 3), loaders(images, 1, 12)
    for step in range(one[0].steps_per_epoch):
        together = torch.cat([loader.batch(1, step)[0] for loader in four])
        assert torch.equal(together, one[0].batch(1, step)[0])


def test_a_sample_is_augmented_anew_in_every_epoch() -> None:
    (loader,) = loaders(image_set(1, size=9), 1, 1)
    assert len({loader.batch(epoch, 0)[0].numpy().tobytes() for epoch in range(20)}) > 5


def test_without_augmentation_the_pixels_are_the_images() -> None:
    images = image_set(20)
    loader = Pixels(images).training(batch_size=4, rank=1, size=2, seed=0)
    pixels, labels = loader.batch(0, 1)
    expected, expected_labels = (each[loader.shards.indices(0, 1).copy()] for each in whole(images))
    assert torch.equal(pixels, expected)
    assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_batches_change_nothing(device: torch.device) -> None:
    images = image_set(123)
    for rank in range(2):
        alone, blocks = (loaders(images, 2, 7)[rank] for _ in range(2))
        blocks.to(device)
        blocks.source.block = 30
        last = alone.steps_per_epoch - 1
        for epoch, step in ((0, 0), (0, 3), (0, 4), (1, last), (5, 2), (0, 4)):
            assert same(blocks.batch(epoch, step), alone.batch(epoch, step))


def test_images_that_do_not_fit_are_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **keys: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    (loader,) = loaders(image_set(20), 1, 5)
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(DataError, match="20 images of 0.0 GB do not fit on cpu: no room"):
        loader.to(CPU)


def test_a_crop_wider_than_half_the_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"crop 5 is not in \[0, 4\]"):
        Pixels(image_set(10), Augment(crop=5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 2, 5, 23])
def test_evaluation_over_all_ranks_sees_every_image_once(count: int, device: torch.device) -> None:
    images = image_set(23)
    part = ImageSet(images.images[:count], images.labels[:count], images.mean, images.std, images.classes)
    ranks = [Pixels(part).held_out(batch_size=3, rank=rank, size=4).to(device) for rank in range(4)]
    batches = [batch for loader in ranks for batch in loader]
    assert sum(len(labels) for _, labels in batches) == count
    expected, labels = whole(part)
    found = torch.cat([torch.empty(0, 3, 8, 8), *(pixels.cpu() for pixels, _ in batches)])
    assert torch.equal(found, expected)
    assert [int(label) for _, mine in batches for label in mine] == labels.tolist()


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
def test_arrays_that_do_not_fit_are_refused_with_what_they_are(
    change: dict[str, object], message: str
) -> None:
    fields = {
        "images": np.zeros((4, 3, 8, 8), np.uint8),
        "labels": np.zeros(4, np.int64),
        "mean": (0.5,) * 3,
        "std": (0.2,) * 3,
        "classes": ("a", "b", "c", "d"),
    }
    with pytest.raises(DataError, match=message):
        ImageSet(**(fields | change))  # type: ignore[arg-type]
