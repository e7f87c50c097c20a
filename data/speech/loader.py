"""Batches of recordings of similar length as torch tensors, sharded by rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import (
    ORDER,
    TEMPO,
    Draws,
    EpochLoader,
    HeldOut,
    HeldOutPlace,
    Place,
    Samples,
    ShardedBatches,
    Source,
    epoch_draws,
    evaluation_batches,
)
from data.speech.file import RATE, SpeechSet

SPREAD = 0.2
"""The random factor on lengths is uniform in [1, 1 + SPREAD), so that company changes from epoch to epoch."""


@dataclass(frozen=True)
class SpeechBatch:
    """Some utterances.

    Args:
        samples: int16[batch, longest], zeros beyond each end; on the loader's device.
        lengths: int64[batch], on the CPU: samples of each.
        targets: int64[total], on the loader's device: the transcripts' labels, one after the other.
        target_lengths: int64[batch], on the CPU: labels of each.
        indices: int64[batch], positions in the split.
        draws: uint64[batch], a random number for the tempo of each; None outside training.
    """

    samples: torch.Tensor
    lengths: torch.Tensor
    targets: torch.Tensor
    target_lengths: torch.Tensor
    indices: NDArray[np.int64]
    draws: NDArray[np.uint64] | None = None


class LengthBuckets(ShardedBatches):
    """ShardedBatches in which a step's utterances are of like length, on all ranks together.

    An epoch's utterances, but for the random remainder that fills no step, are sorted by length times a random factor,
    cut into steps, and the steps are shuffled. All of it is a function of (seed, epoch) and of size * batch_size.

    Args:
        lengths: of the utterances, at least 1.
        place: of this rank, with the errors of ShardedBatches.
    """

    def __init__(self, lengths: NDArray[np.int64], **place: Unpack[Place]) -> None:
        super().__init__(len(lengths), **place)
        self._lengths = lengths

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        """With neighbours of like length."""
        per_step = self.size * self.batch_size
        used, left = np.split(super()._shuffled(epoch), [self.steps_per_epoch * per_step])
        # the bits that shuffled are the high ones
        draws = epoch_draws(self.count, self.seed, epoch, ORDER)
        spreads, places = draws & np.uint64(0xFFFF), draws >> np.uint64(16) & np.uint64(0xFFFF)
        factors = 1.0 + SPREAD * spreads[used] / 2**16
        by_length = used[np.argsort(self._lengths[used] * factors, kind="stable")].reshape(-1, per_step)
        by_length = by_length[np.argsort(places[by_length[:, 0]], kind="stable")]
        return np.concatenate([by_length.reshape(-1), left])


class Utterances(Source[SpeechBatch]):
    """A split's recordings and transcripts; on the host mapped.

    Args:
        speech: the split.
    """

    stream = TEMPO

    def __init__(self, speech: SpeechSet) -> None:
        super().__init__(len(speech), f"{len(speech)} utterances")
        self.speech = speech
        self._samples = torch.from_numpy(speech.samples)
        self._labels = torch.from_numpy(speech.labels.astype(np.int64))

    def cut(self, samples: Samples, draws: Draws = None) -> SpeechBatch:
        speech = self.speech
        spans = zip(speech.offsets[samples].tolist(), speech.offsets[samples + 1].tolist(), strict=True)
        labels = zip(
            speech.label_offsets[samples].tolist(), speech.label_offsets[samples + 1].tolist(), strict=True
        )
        return SpeechBatch(
            samples=torch.nn.utils.rnn.pad_sequence(
                [self._samples[start:stop] for start, stop in spans], batch_first=True
            ),
            lengths=torch.from_numpy(speech.lengths[samples]),
            targets=torch.cat([self._labels[start:stop] for start, stop in labels]),
            target_lengths=torch.from_numpy(speech.label_lengths[samples]),
            indices=samples,
            draws=draws,
        )

    def training(self, **place: Unpack[Place]) -> EpochLoader[SpeechBatch]:
        return EpochLoader(self, LengthBuckets(self.speech.lengths, **place))

    def held_out(self, *, most: int = 0, **place: Unpack[HeldOutPlace]) -> HeldOut[SpeechBatch]:
        """As Source.held_out, a rank's utterances of like length together."""
        heard = np.concatenate([np.zeros(0, np.int64), *evaluation_batches(len(self), most=most, **place)])
        by_length, size = heard[np.argsort(self.speech.lengths[heard], kind="stable")], place["batch_size"]
        return HeldOut(self, (by_length[start : start + size] for start in range(0, len(heard), size)))


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
    frames = frame_count(lengths)
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
