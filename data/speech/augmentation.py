"""What changes recordings for training: noise, tempo, masks; on whatever device they are, each by a random number of its own."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def add_noise(
    samples: torch.Tensor, lengths: torch.Tensor, draws: NDArray[np.uint64], *, snr: Sequence[float]
) -> torch.Tensor:
    """White noise of a random loudness over each recording.

    The noise is that of torch's generator on the device of the samples, seeded for each recording: the same alone and in company,
    another one on another kind of device.

    Args:
        samples: int16[batch, samples], zeros beyond the end of each recording.
        lengths: int64[batch], on the CPU: samples of each recording, at least 1.
        draws: uint64[batch], a random number for each.
        snr: least and most decibels of the signal over the noise; uniform between them.

    Returns:
        float32 like samples, zeros beyond each end. Silence stays as it is: no noise is that much softer.
    """
    noisy = samples.to(torch.float32, copy=True)
    generator = torch.Generator(samples.device)
    for row, (draw, length) in enumerate(zip(draws.tolist(), lengths.tolist(), strict=True)):
        decibels = _between(snr, draw & 0xFFFF)
        generator.manual_seed(draw >> 16)
        noise = torch.randn(length, generator=generator, device=samples.device)
        loudness = noisy[row, :length].square().mean().sqrt()
        noisy[row, :length] += noise * loudness * 10 ** (-decibels / 20)
    return noisy


def change_tempo(
    spectrograms: torch.Tensor, frames: torch.Tensor, draws: NDArray[np.uint64], *, tempo: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each recording faster or slower at the same pitch: its frames interpolated linearly along time.

    Args:
        spectrograms: float32[batch, frequencies, frames], zeros beyond each end.
        frames: int64[batch], on the CPU: frames of each recording, at least 1.
        draws: uint64[batch], a random number for each.
        tempo: least and most factor on the speed; uniform between them.

    Returns:
        As spectrograms and frames; a recording has frames / factor of them, rounded down, at least 1.
    """
    counts = [
        played(count, _between(tempo, draw & 0xFFFF))
        for draw, count in zip(draws.tolist(), frames.tolist(), strict=True)
    ]
    changed = spectrograms.new_zeros((*spectrograms.shape[:2], max(counts)))
    for row, (before, after) in enumerate(zip(frames.tolist(), counts, strict=True)):
        changed[row, :, :after] = torch.nn.functional.interpolate(
            spectrograms[row : row + 1, :, :before], size=after, mode="linear"
        )[0]
    return changed, torch.tensor(counts)


def played(frames: int, factor: float) -> int:
    """Frames of a recording of so many at another tempo."""
    return max(1, int(frames / factor))


def mask(
    spectrograms: torch.Tensor, frames: torch.Tensor, draws: NDArray[np.uint64], *, bins: int, steps: int
) -> torch.Tensor:
    """SpecAugment: one band of frequencies and one stretch of time of each recording become its mean, 0.

    Args:
        spectrograms: float32[batch, frequencies, frames].
        frames: int64[batch], on the CPU: frames of each recording.
        draws: uint64[batch], a random number for each.
        bins: the band's width is uniform in [0, bins].
        steps: the stretch's frames are uniform in [0, steps], but never more than half the recording.

    Returns:
        A new tensor like spectrograms.

    Source: Park et al., SpecAugment, Interspeech 2019.
    """
    masked = spectrograms.clone()
    for row, (draw, count) in enumerate(zip(draws.tolist(), frames.tolist(), strict=True)):
        parts = [draw >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
        band = parts[0] % (min(bins, masked.shape[1]) + 1)
        low = parts[1] % (masked.shape[1] - band + 1)
        stretch = parts[2] % (min(steps, count // 2) + 1)
        first = parts[3] % (count - stretch + 1)
        masked[row, low : low + band] = 0.0
        masked[row, :, first : first + stretch] = 0.0
    return masked


def _between(bounds: Sequence[float], draw: int) -> float:
    """A number in [least, most) from 16 random bits."""
    least, most = bounds
    return least + (most - least) * draw / 2**16
