"""Generates images: as many classes and samples as asked for."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from data import DataError
from data.images.file import ImageSet, channel_statistics
from data.sharding import SYNTHETIC, epoch_draws

CELLS = 8
NOISE = 3  # quarters of a pixel; the rest is the class's pattern
CHANNELS = 3
BLOCK = 4096
_PATTERNS, _NOISE, _SHIFTS = range(3)


def load_synthetic(
    size: int = 32, *, classes: int = 1000, samples: int = 50_000, held_out: float = 0.5, seed: int = 0
) -> tuple[ImageSet, ImageSet]:
    """Noise over one smooth pattern for each class, which each image shows shifted, in three channels.

    A pattern is 8 x 8 random colours, enlarged bilinearly. A pixel is a quarter of it and three quarters of uniform noise. The
    pattern is shifted by up to an eighth of the image, and what leaves it on one side comes back on the other. Sample i is of
    class i mod classes.

    Args:
        size: height and width in pixels, at least 8.
        classes: at least 2.
        samples: of both splits together.
        held_out: part of the samples that makes the test split, the last ones, in (0, 1).
        seed: of patterns and noise, at least 0. Not a run's seed: runs to be compared share the images.

    Returns:
        The training and the test split, with mean and std of the training split; equal on all ranks.

    Raises:
        DataError: a split would have fewer samples than classes.

    Memory: samples * size * size * 3 bytes, twice while they are made.
    """
    first_held_out = samples - round(held_out * samples)
    if min(first_held_out, samples - first_held_out) < classes:
        raise DataError(
            f"{samples} samples, {held_out:g} of them held out, are not at least one of each of the {classes} classes in "
            "both splits"
        )
    labels = np.arange(samples) % classes
    images = np.concatenate(list(_blocks(labels, size, classes, seed)))
    mean, std = channel_statistics(images[:first_held_out])
    train, test = (
        ImageSet(
            images=images[part],
            labels=labels[part],
            mean=mean,
            std=std,
            classes=tuple(map(str, range(classes))),
            name="synthetic",
            source=f"made up: {samples} samples of {classes} classes at {size}x{size}, {held_out:g} held out, seed {seed}",
        )
        for part in (slice(0, first_held_out), slice(first_held_out, samples))
    )
    return train, test


def _blocks(labels: NDArray[np.int64], size: int, classes: int, seed: int) -> Iterator[NDArray[np.uint8]]:
    """uint8[block, 3, size, size] of all samples, block after block."""
    patterns = _patterns(size, classes, seed)
    most = size // 8
    spans = epoch_draws(2 * len(labels), seed, _SHIFTS, SYNTHETIC) % np.uint64(2 * most + 1)
    shifts = spans.astype(np.int64).reshape(2, -1, 1) - most
    rows, columns = (np.arange(size) + shift for shift in shifts)
    pixels = CHANNELS * size * size
    noise = epoch_draws(-(-len(labels) * pixels // 8), seed, _NOISE, SYNTHETIC).astype("<u8").view(np.uint8)
    for start in range(0, len(labels), BLOCK):
        here = slice(start, min(start + BLOCK, len(labels)))
        shown = patterns[
            labels[here, None, None, None],
            np.arange(CHANNELS)[:, None, None],
            (rows[here] % size)[:, None, :, None],
            (columns[here] % size)[:, None, None, :],
        ]
        uniform = noise[here.start * pixels : here.stop * pixels].reshape(shown.shape)
        yield ((shown.astype(np.uint16) + NOISE * uniform.astype(np.uint16)) // (NOISE + 1)).astype(np.uint8)


def _patterns(size: int, classes: int, seed: int) -> NDArray[np.uint8]:
    """uint8[classes, 3, size, size]."""
    draws = epoch_draws(classes * CHANNELS * CELLS * CELLS, seed, _PATTERNS, SYNTHETIC)
    cells = (draws >> np.uint64(56)).astype(np.float32).reshape(classes, CHANNELS, CELLS, CELLS)
    enlarged = torch.nn.functional.interpolate(
        torch.from_numpy(cells), size=(size, size), mode="bilinear", align_corners=False
    )
    pixels: NDArray[np.uint8] = enlarged.round().clamp(0, 255).to(torch.uint8).numpy()
    return pixels
