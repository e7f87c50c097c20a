"""Computes log-spectrograms of a padded batch of recordings, on their device; changes the tempo."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from data.speech.file import RATE

WINDOW = RATE // 50
HOP = RATE // 100
BINS = WINDOW // 2 + 1


def log_spectrograms(samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised logarithms of the magnitudes of 20 ms Hamming windows every 10 ms.

    log(1 + magnitude), in units of the 16-bit samples: what is below their quantisation stays near 0. Each recording is
    standardised by itself, and is what it would be alone.

    Args:
        samples: int16 or float32[batch, samples], zeros beyond the end of each recording.
        lengths: int64[batch], on the CPU: samples of each recording, at least 1.

    Returns:
        float32[batch, 161, frames], on the device of samples, zeros beyond each end, and int64[batch], on the CPU: frames.
    """
    window = torch.hamming_window(WINDOW, device=samples.device)
    spectrum = torch.stft(
        samples.float(), WINDOW, HOP, window=window, center=True, pad_mode="constant", return_complex=True
    )
    logs = torch.log1p(spectrum.abs())
    frames = lengths // HOP + 1  # one every 10 ms, the first around sample 0
    places = torch.arange(logs.shape[2], device=logs.device)
    inside = (places < frames.to(logs.device)[:, None])[:, None, :]
    counts = (BINS * frames).to(logs.device)[:, None, None]
    mean = torch.where(inside, logs, 0.0).sum(dim=(1, 2), keepdim=True) / counts
    centred = torch.where(inside, logs - mean, 0.0)
    deviation = (centred.square().sum(dim=(1, 2), keepdim=True) / counts).sqrt()
    return centred / deviation.clamp(min=1e-5), frames


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
    least, most = tempo
    counts = [
        max(1, int(count / (least + (most - least) * (draw & 0xFFFF) / 2**16)))
        for draw, count in zip(draws.tolist(), frames.tolist(), strict=True)
    ]
    changed = spectrograms.new_zeros((*spectrograms.shape[:2], max(counts)))
    for row, (before, after) in enumerate(zip(frames.tolist(), counts, strict=True)):
        changed[row, :, :after] = torch.nn.functional.interpolate(
            spectrograms[row : row + 1, :, :before], size=after, mode="linear"
        )[0]
    return changed, torch.tensor(counts)
