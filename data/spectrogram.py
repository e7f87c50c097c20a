"""Log-spectrograms of a padded batch of recordings, by torch's STFT on whatever device the samples are."""

import numpy as np
import torch
from numpy.typing import NDArray

from data.speech import RATE

WINDOW = RATE // 50
HOP = RATE // 100
BINS = WINDOW // 2 + 1


def frame_count(samples: torch.Tensor) -> torch.Tensor:
    """Frames of recordings of so many samples: one every 10 ms, the first around sample 0."""
    return samples // HOP + 1


def log_spectrograms(samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised logarithms of the magnitudes of 20 ms Hamming windows every 10 ms.

    log(1 + magnitude), in units of the 16-bit samples: what is below their quantisation stays near 0. Each recording is
    standardised by itself, and is what it would be alone.

    Args:
        samples: int16[batch, samples], zeros beyond the end of each recording.
        lengths: int64[batch], on the CPU: samples of each recording, at least 1.

    Returns:
        float32[batch, 161, frames], on the device of samples, zeros beyond each end, and int64[batch], on the CPU: frames.
    """
    window = torch.hamming_window(WINDOW, device=samples.device)
    spectrum = torch.stft(
        samples.float(), WINDOW, HOP, window=window, center=True, pad_mode="constant", return_complex=True
    )
    logs = torch.log1p(spectrum.abs())
    frames = frame_count(lengths)
    places = torch.arange(logs.shape[2], device=logs.device)
    inside = (places < frames.to(logs.device)[:, None])[:, None, :]
    counts = (BINS * frames).to(logs.device)[:, None, None]
    mean = torch.where(inside, logs, 0.0).sum(dim=(1, 2), keepdim=True) / counts
    centred = torch.where(inside, logs - mean, 0.0)
    deviation = (centred.square().sum(dim=(1, 2), keepdim=True) / counts).sqrt()
    return centred / deviation.clamp(min=1e-5), frames


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
