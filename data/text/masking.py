"""Batches of packed text on any device; words are masked anew in every epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from data import DataError
from data.batches import BlockLoader
from data.sharding import MASKING, ShardedBatches, epoch_draws, evaluation_batches
from data.text.file import TextSet

PART = 0.15
IGNORED = -100
BLOCK = 2**18
"""Tokens that are cut together, where a batch has fewer: all batches among them share the some hundred small kernels of it."""


class TextBatch(NamedTuple):
    """A batch for masked words and the next sentence.

    Attributes:
        tokens: int64[batch, length], some of them masked.
        segments: int64[batch, length], 1 in the second segment.
        present: bool[batch, length], False where padded.
        places: int64[batch, count], of the words that are to be predicted.
        labels: int64[batch, count], the words there; IGNORED at places beyond a short sequence's share.
        follows: int64[batch]: 0 the second segment follows, 1 it does not, IGNORED there is none.
    """

    tokens: torch.Tensor
    segments: torch.Tensor
    present: torch.Tensor
    places: torch.Tensor
    labels: torch.Tensor
    follows: torch.Tensor


class MaskedText:
    """Packed text on a device, from which batches are cut.

    15 % of a sequence's words (one at least) are to be predicted: 8 of 10 are replaced by [MASK], 1 by any word, 1 stays. Which
    ones, is a function of a random number per sequence, and the same on every device.

    Args:
        texts: one split.
        device: where; on the host the tokens stay mapped.

    Raises:
        DataError: they do not fit on the device.

    Source: Devlin et al., NAACL 2019.
    """

    def __init__(self, texts: TextSet, device: torch.device) -> None:
        self.device = device
        self.count = max(1, round(PART * texts.length))
        self._words = len(texts.vocabulary)
        self._mask = texts.number("[MASK]")
        self._apart = [texts.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")]
        sequences = texts.sequences
        try:
            # torch cannot index uint16 everywhere; the sign is taken off after the cut
            self._tokens = torch.from_numpy(sequences.tokens.view(np.int16)).to(device)
            self._spans = torch.from_numpy(sequences.spans.astype(np.int64)).to(device)
            self._follows = torch.from_numpy(sequences.follows.astype(np.int64)).to(device)
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{texts.path}: {len(texts)} sequences do not fit on {device}: {error}"
            ) from error
        self._columns = torch.arange(texts.length, device=device)

    def cut(self, samples: torch.Tensor, draws: torch.Tensor) -> TextBatch:
        """A batch.

        Args:
            samples: int64[batch], sequences of the split, on the device.
            draws: int64[batch], 64 random bits for each, there too.
        """
        tokens = self._tokens[samples].long() & 0xFFFF
        spans = self._spans[samples]
        present = self._columns < spans[:, 1:]
        segments = ((self._columns >= spans[:, :1]) & present).long()
        words = present.clone()
        for special in self._apart:
            words &= tokens != special

        order = mixed(draws[:, None] + GOLDEN * (self._columns + 1)) & POSITIVE
        ranked = order.masked_fill(~words, POSITIVE).sort(dim=1, stable=True).indices
        places = ranked[:, : self.count]
        share = (words.sum(1, keepdim=True) * PART).round().clamp(1, self.count)
        predicted = (self._columns[: self.count] < share) & words.gather(1, places)
        original = tokens.gather(1, places)
        labels = original.masked_fill(~predicted, IGNORED)

        fate = mixed(order.gather(1, places)) & POSITIVE
        any_word = (mixed(fate) & POSITIVE) % self._words
        replaced = torch.where(fate % 10 < 8, self._mask, torch.where(fate % 10 == 8, any_word, original))
        masked = tokens.scatter(1, places, torch.where(predicted, replaced, original))
        follows = self._follows[samples]
        return TextBatch(masked, segments, present, places, labels, follows.masked_fill(follows < 0, IGNORED))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
POSITIVE = (1 << 63) - 1


def mixed(bits: torch.Tensor) -> torch.Tensor:
    """int64 -> int64: SplitMix64's output function, bijective, and alike on every device.

    Source: Steele, Lea & Flood, OOPSLA 2014.
    """
    for distance, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        bits = (bits ^ ((bits >> distance) & ((1 << (64 - distance)) - 1))) * factor
    return bits


class TextTrainingLoader(BlockLoader[TextBatch]):
    """One rank's training batches, shuffled and masked anew in every epoch.

    Memory: on the device, the split's tokens in 2 bytes each, and some 20 MB while a block of BLOCK tokens is cut.

    Args:
        texts: the training split.
        batch_size: sequences per rank and step.
        rank, size: this rank and the number of ranks.
        seed: at least 0, the same on all ranks.

    Raises:
        DataError: fewer sequences than ranks, or than one step of all ranks needs.
    """

    def __init__(self, texts: TextSet, *, batch_size: int, rank: int, size: int, seed: int) -> None:
        try:
            shards = ShardedBatches(len(texts), batch_size=batch_size, rank=rank, size=size, seed=seed)
        except DataError as error:
            raise DataError(f"{texts.path}: {error}") from error
        super().__init__(shards, MASKING)
        self.texts = texts
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> Self:
        self._text = MaskedText(self.texts, device)
        self._begin(BLOCK // self.texts.length)
        return self

    def batch(self, epoch: int, step: int) -> TextBatch:
        return TextBatch(*self._pieces(epoch, step))

    def _plan(self, epoch: int) -> torch.Tensor:
        """int64[2, sequences] on the device: number and draw of each, in this rank's order of the epoch."""
        samples = self.shards.all_indices(epoch)
        return _plan(samples, self.draws(epoch)[samples]).to(self._text.device)

    def _cut(self, plan: torch.Tensor) -> TextBatch:
        return self._text.cut(*plan)


class TextEvaluationLoader:
    """One rank's part of the held-out split in order, every sequence once over all ranks, always masked alike.

    Args:
        texts: the held-out split.
        batch_size: sequences per batch at most; no effect on what is measured.
        rank, size: this rank and the number of ranks.
        most: so many sequences at most, spread evenly over the split, the same on any number of ranks; 0: all.

    Raises:
        ValueError: an argument out of bounds.
    """

    def __init__(self, texts: TextSet, *, batch_size: int, rank: int, size: int, most: int = 0) -> None:
        draws = epoch_draws(len(texts), 0, 0, MASKING)
        place = {"batch_size": batch_size, "rank": rank, "size": size, "most": most}
        self.texts = texts
        self._plans = [_plan(samples, draws[samples]) for samples in evaluation_batches(len(texts), **place)]
        self._text = MaskedText(texts, torch.device("cpu"))

    def to(self, device: torch.device) -> Self:
        self._text = MaskedText(self.texts, device)
        self._plans = [plan.to(device) for plan in self._plans]
        return self

    def __iter__(self) -> Iterator[TextBatch]:
        return (self._text.cut(samples, draws) for samples, draws in self._plans)


def _plan(samples: NDArray[np.int64], draws: NDArray[np.uint64]) -> torch.Tensor:
    return torch.from_numpy(np.stack([samples, draws.view(np.int64)]))
