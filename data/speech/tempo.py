"""Recordings played faster or slower for training, on the device that they are on."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


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
        played(count, least + (most - least) * (draw & 0xFFFF) / 2**16)
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
