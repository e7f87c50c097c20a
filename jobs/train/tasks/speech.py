"""Speech recognition by CTC: a Workload, decoding, and errors between texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jiwer
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from data import DataError
from data.speech.file import ALPHABET, SpeechSet, decoded, open_speech_file
from data.speech.loader import (
    SpeechBatch,
    Utterances,
    change_tempo,
    frame_count,
    log_spectrograms,
    played,
)
from jobs.config.config import Config
from jobs.train.placement import Placement
from jobs.train.tasks.task import Workload
from models.lstm import LSTM, output_lengths


class Speech(Workload[SpeechBatch]):
    """Recordings into characters by CTC.

    The loss of a batch is the mean over its utterances of the sum over their frames. A score counts words: its loss is per word
    and its accuracy 1 - word error rate, which is negative where more words are inserted than heard right. The model takes
    spectrograms and frames, and returns logits and output frames.
    """

    def move_to(self, placement: Placement) -> None:
        super().move_to(placement)
        # nearly every batch has a length of its own, and would be searched the fastest convolution for
        torch.backends.cudnn.benchmark = False

    def loss(self, batch: SpeechBatch) -> torch.Tensor:
        """CTC's loss, the mean over the utterances."""
        return self._ctc(*self._scores(self.network, batch), batch) / len(batch.lengths)

    def _counts(self, batch: SpeechBatch) -> tuple[torch.Tensor | int, ...]:
        scores, frames = self._scores(self.model, batch)
        rows = zip(scores.transpose(0, 1).cpu().numpy(), frames.tolist(), strict=True)
        said = [decoded(text.numpy()) for text in batch.targets.cpu().split(batch.target_lengths.tolist())]
        wrong, words, *characters = count_errors(said, [decode(row[:count]) for row, count in rows])
        return self._ctc(scores, frames, batch), words - wrong, words, *characters

    def _scores(self, network: nn.Module, batch: SpeechBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[output frames, batch, labels], log-probabilities, and int64[batch], the output frames of each."""
        spectrograms, frames = spectrograms_of(batch, self._config.data.tempo)
        logits, outputs = self._run(network, spectrograms, frames)
        return logits.float().log_softmax(dim=2).transpose(0, 1), outputs

    def _ctc(self, scores: torch.Tensor, frames: torch.Tensor, batch: SpeechBatch) -> torch.Tensor:
        return nn.functional.ctc_loss(scores, batch.targets, frames, batch.target_lengths, reduction="sum")


def spectrograms_of(batch: SpeechBatch, tempo: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[batch, bins, frames] and int64[batch], the frames of each; training batches are played at a tempo of this range."""
    spectrograms, frames = log_spectrograms(batch.samples, batch.lengths)
    if batch.draws is not None and tempo:
        return change_tempo(spectrograms, frames, batch.draws, tempo=tempo)
    return spectrograms, frames


def build_speech(config: Config, *, rank: int, size: int) -> Speech:
    """The workload that a configuration with a network for speech describes; the weights are equal on all ranks.

    Raises:
        DataError: data that is missing, broken, too little for the ranks, or an utterance too short for its transcript.
        WorkloadError: settings and data that do not go together.
    """
    train, held_out = open_speech_file(config.data.path)
    for split, speech in (("train", train), ("test", held_out)) if not config.model.factory else ():
        fastest = config.data.tempo[1] if config.data.tempo and split == "train" else 1.0
        # batch normalization takes no single frame
        least = 2 if split == "train" else 1
        check_lengths(speech, f"{config.data.path}, split {split!r}", fastest, least)
    make = partial(LSTM, labels=len(ALPHABET), width=config.model.width)
    return Speech(make, Utterances(train), Utterances(held_out), config, rank=rank, size=size)


def check_lengths(speech: SpeechSet, where: str, tempo: float = 1.0, least: int = 1) -> None:
    """Refuse what CTC cannot align: each label takes a frame, and so does a blank between two that are equal.

    Args:
        speech: a split.
        where: names it in messages.
        tempo: the fastest that it is played.
        least: frames that the network needs of any utterance.

    Raises:
        DataError: the network gives an utterance fewer frames than its transcript, or the network itself, needs.
    """
    spectrograms = frame_count(torch.from_numpy(speech.lengths)).tolist()
    frames = output_lengths(torch.tensor([played(count, tempo) for count in spectrograms])).numpy()
    repeated = np.zeros(len(speech.labels), np.int64)
    repeated[1:] = speech.labels[1:] == speech.labels[:-1]
    firsts = speech.label_offsets[:-1]
    repeated[firsts] = 0
    needed = speech.label_lengths + np.add.reduceat(repeated, firsts)
    short = np.flatnonzero(frames < np.maximum(needed, least))
    if len(short):
        which = int(short[0])
        wanted = (
            f"{needed[which]} that CTC needs for {speech.transcript(which)!r}"
            if frames[which] < needed[which]
            else f"{least} that batch normalization needs"
        )
        raise DataError(
            f"{where}, utterance {speech.names[which]}: {frames[which]} frames of the network"
            f"{f' at a tempo of {tempo:g}' if tempo != 1.0 else ''} are fewer than the {wanted}"
        )


BLANK = 0


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[int, ...]:
    """Compare texts, by the library jiwer.

    Args:
        references: what was said, one or more, none of them empty.
        hypotheses: what was heard, one for each.

    Returns:
        Wrong words, words said, wrong characters, characters said. Errors are substitutions, deletions and insertions, which
        together may be more than words.
    """
    counts: list[int] = []
    for compare in (jiwer.process_words, jiwer.process_characters):
        errors = compare(list(references), list(hypotheses))
        missed = errors.substitutions + errors.deletions
        counts += [missed + errors.insertions, missed + errors.hits]
    return tuple(counts)


def decode(log_probabilities: NDArray[np.float32]) -> str:
    """The text of one utterance: the likeliest label of each frame, repetitions merged, blanks and spaces at its ends dropped.

    Args:
        log_probabilities: float32[frames, labels], of data.speech.file.ALPHABET.
    """
    best = log_probabilities.argmax(axis=1)
    merged = best[np.flatnonzero(np.diff(best, prepend=-1))]
    return " ".join(decoded(merged[merged != BLANK]).split())
