"""scikit-learn's handwritten digits, enlarged: a real data set without a file or a network."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import ORDER, epoch_draws
from data.images.file import ImageSet, channel_statistics

CLASSES = tuple(str(digit) for digit in range(10))
ORIGINAL_SIZE = 8
GREY_LEVELS = 16


def load_digits(size: int = 32, held_out: float = 0.5, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """The 1,797 digits at size x size, in three equal channels, split into a training and a held-out part.

    They come with scikit-learn, at 8x8 with 17 grey levels, and are enlarged bilinearly. Do not mirror them
    in training: Augment(crop=..., flip=False).

    Args:
        size: height and width in pixels, at least 8.
        held_out: part of each class that makes the test split, in (0, 1); each part keeps one sample at
            least.
        seed: of the split, at least 0. Not a run's seed: runs to be compared share the split.

    Returns:
        The training and the test split, with mean and std of the training split, each in the original order.

    Raises:
        ModuleNotFoundError: there is no scikit-learn.

    Source: Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI 1998 (its test part).
    """
    original = _read_originals()
    labels = original[:, -1].astype(np.int64)
    levels = original[:, :-1].reshape(-1, 1, ORIGINAL_SIZE, ORIGINAL_SIZE)
    grey = torch.from_numpy(np.ascontiguousarray(levels)) * (255 / GREY_LEVELS)
    enlarged = torch.nn.functional.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False)
    pixels = enlarged.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).numpy()

    draws = epoch_draws(len(labels), seed, 0, ORDER)
    test = np.zeros(len(labels), bool)
    for digit in range(len(CLASSES)):
        members = np.flatnonzero(labels == digit)
        count = min(max(round(held_out * len(members)), 1), len(members) - 1)
        test[members[np.argsort(draws[members], kind="stable")[:count]]] = True
    mean, std = channel_statistics(pixels[~test])
    train_part, test_part = (
        ImageSet(
            images=np.ascontiguousarray(pixels[part]),
            labels=labels[part],
            mean=mean,
            std=std,
            classes=CLASSES,
            name="digits",
            source=f"scikit-learn's digits at {size}x{size}, {held_out:g} held out, split seed {seed}",
        )
        for part in (~test, test)
    )
    return train_part, test_part


def _read_originals() -> NDArray[np.float32]:
    """float32[1797, 65], a digit a row: grey levels in [0, 16], then the label.

    Read from scikit-learn's file: each rank would take more than a second of a core to import scikit-learn.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install scikit-learn", name="sklearn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(path, np.float32, delimiter=",")
