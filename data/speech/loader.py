"""Batches of recordings of similar length as torch tensors, sharded by rank."""

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import EpochLoader, HeldOut, HeldOutPlace, Place, Resident
from data.sharding import (
    ORDER,
    TEMPO,
    ShardedBatches,
    epoch_draws,
    evaluation_batches,
    evaluation_shard,
)
from data.speech.dataset import SpeechSet

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
        self._bucketed: tuple[int, NDArray[np.int64]] | None = None

    def order(self, epoch: int) -> NDArray[np.int64]:
        """As ShardedBatches.order, with neighbours of like length."""
        if self._bucketed is None or self._bucketed[0] != epoch:
            shuffled = super().order(epoch)
            per_step = self.size * self.batch_size
            used, left = np.split(shuffled, [self.steps_per_epoch * per_step])
            # the bits that shuffled are the high ones
            draws = epoch_draws(self.count, self.seed, epoch, ORDER)
            spreads, places = draws & np.uint64(0xFFFF), draws >> np.uint64(16) & np.uint64(0xFFFF)
            factors = 1.0 + SPREAD * spreads[used] / 2**16
            by_length = used[np.argsort(self._lengths[used] * factors, kind="stable")].reshape(-1, per_step)
            by_length = by_length[np.argsort(places[by_length[:, 0]], kind="stable")]
            order = np.concatenate([by_length.reshape(-1), left])
            order.flags.writeable = False
            self._bucketed = (epoch, order)
        return self._bucketed[1]


class Utterances(Resident):
    """A split's recordings and transcripts, from which batches are cut; on the host mapped, on a device resident.

    Args:
        speech: the split.
    """

    def __init__(self, speech: SpeechSet) -> None:
        super().__init__(f"{len(speech)} utterances")
        self.speech = speech
        self._samples = torch.from_numpy(speech.samples)
        self._labels = torch.from_numpy(speech.labels.astype(np.int64))

    def batch(self, indices: NDArray[np.int64], draws: NDArray[np.uint64] | None = None) -> SpeechBatch:
        """Some utterances of the split, at least one."""
        speech = self.speech
        spans = zip(speech.offsets[indices].tolist(), speech.offsets[indices + 1].tolist(), strict=True)
        labels = zip(
            speech.label_offsets[indices].tolist(), speech.label_offsets[indices + 1].tolist(), strict=True
        )
        return SpeechBatch(
            samples=torch.nn.utils.rnn.pad_sequence(
                [self._samples[start:stop] for start, stop in spans], batch_first=True
            ),
            lengths=torch.from_numpy(speech.lengths[indices]),
            targets=torch.cat([self._labels[start:stop] for start, stop in labels]),
            target_lengths=torch.from_numpy(speech.label_lengths[indices]),
            indices=indices,
            draws=draws,
        )


class SpeechTrainingLoader(EpochLoader[SpeechBatch]):
    """One rank's training batches.

    Args:
        speech: the training split.
        place: of this rank, with the errors of ShardedBatches.
    """

    def __init__(self, speech: SpeechSet, **place: Unpack[Place]) -> None:
        super().__init__(LengthBuckets(speech.lengths, **place), TEMPO)
        self.utterances = Utterances(speech)

    def to(self, device: torch.device) -> None:
        self.utterances.to(device)

    def batch(self, epoch: int, step: int) -> SpeechBatch:
        indices = self.shards.indices(epoch, step)
        return self.utterances.batch(indices, self.draws(epoch)[indices])


class SpeechEvaluationLoader(HeldOut[SpeechBatch]):
    """One rank's part of a test split, every utterance once over all ranks, those of like length together."""

    def __init__(self, speech: SpeechSet, **place: Unpack[HeldOutPlace]) -> None:
        shard = np.array(evaluation_shard(len(speech), rank=place["rank"], size=place["size"]), np.int64)
        by_length = shard[np.argsort(speech.lengths[shard], kind="stable")]
        batches = evaluation_batches(len(shard), batch_size=place["batch_size"], rank=0, size=1)
        self.utterances = Utterances(speech)
        super().__init__(self.utterances, self.utterances.batch, (by_length[each] for each in batches))
