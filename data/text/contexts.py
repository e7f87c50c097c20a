"""Batches for word embeddings: pairs of adjacent words, a word that stands beside each, and words drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data import DataError
from data.batches import EpochLoader
from data.sharding import CONTEXTS, ShardedBatches, epoch_draws, evaluation_batches
from data.text.file import TextSet
from data.text.masking import GOLDEN, POSITIVE, mixed

_POWER = 0.75
"""Of a word's count, for its chance to be drawn."""
_CHANCES = 1 << 32


class ContextBatch(NamedTuple):
    """Some pairs with their contexts.

    Attributes:
        centers: int64[m], rows of the table of pairs.
        words: int64[m, 1 + negatives]: the word that stands beside the pair, then others drawn at random.
    """

    centers: torch.Tensor
    words: torch.Tensor


class Contexts:
    """Where pairs of adjacent words stand in packed text, and what stands beside them.

    Each pair of words of a sequence gets one context, a word at most `window` words before or after it. A pair is left out
    where that is outside of the sequence, or [PAD], [CLS] or [SEP]. Pairs share rows by hashing. All of it is a function of a
    random number per sequence, and the same on every device.

    Args:
        texts: one split.
        counts: float64[words], how often each word stands in the training split; others are drawn in proportion to its 0.75th
            power.
        rows: that pairs are hashed to.
        window: words on either side.
        negatives: words drawn at random for each pair.

    Source: Mikolov et al., NeurIPS 2013; hashed pairs of words as in Bojanowski et al., TACL 2017.
    """

    def __init__(
        self, texts: TextSet, counts: NDArray[np.float64], *, rows: int, window: int, negatives: int
    ) -> None:
        self.texts, self.device = texts, torch.device("cpu")
        self._rows, self._window = rows, window
        self._apart = [texts.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")]
        chances = np.cumsum(counts**_POWER)
        self._ends = torch.from_numpy(np.ceil(chances / chances[-1] * _CHANCES).astype(np.int64))
        self._tokens = torch.from_numpy(texts.sequences.tokens.view(np.int16))
        self._columns = torch.arange(texts.length)
        self._draws = GOLDEN * (torch.arange(negatives) + 2)

    def to(self, device: torch.device) -> None:
        """Hold the text on a device. Raises DataError: it does not fit."""
        try:
            for name in ("_ends", "_tokens", "_columns", "_draws"):
                setattr(self, name, getattr(self, name).to(device))
        except torch.OutOfMemoryError as error:
            text = f"{self.texts.path}: {len(self.texts)} sequences do not fit on {device}"
            raise DataError(f"{text}: {error}") from error
        self.device = device

    def cut(self, samples: NDArray[np.int64], draws: NDArray[np.uint64]) -> ContextBatch:
        """A batch.

        Args:
            samples: int64[batch], sequences of the split.
            draws: uint64[batch], 64 random bits for each.
        """
        tokens = self._tokens[torch.tensor(samples, device=self.device)].long() & 0xFFFF
        bits = torch.from_numpy(draws.view(np.int64)).to(self.device)
        present = torch.ones_like(tokens, dtype=torch.bool)
        for special in self._apart:
            present &= tokens != special
        random = mixed(bits[:, None] + GOLDEN * (self._columns + 1))
        distance = (random & POSITIVE) % (2 * self._window)
        before = distance < self._window
        at = self._columns + torch.where(before, -1 - distance, 2 + distance - self._window)
        last = self.texts.length - 1
        inside = (at >= 0) & (at <= last) & (self._columns < last)
        at = at.clamp(0, last)
        following = tokens.roll(-1, dims=1)
        taken = inside & present & present.roll(-1, dims=1) & present.gather(1, at)
        pairs = tokens[taken] * len(self.texts.vocabulary) + following[taken]
        centers = (mixed(pairs) & POSITIVE) % self._rows
        drawn = mixed(random[taken][:, None] + self._draws) & (_CHANCES - 1)
        negatives = torch.searchsorted(self._ends, drawn, right=True)
        return ContextBatch(centers, torch.cat([tokens.gather(1, at)[taken][:, None], negatives], dim=1))


class ContextTrainingLoader(EpochLoader[ContextBatch]):
    """One rank's training batches, with other contexts in every epoch.

    Args:
        contexts: of the training split.
        batch_size: sequences per rank and step.
        rank, size, seed: as data.sharding.ShardedBatches.

    Raises:
        DataError: fewer sequences than ranks, or than one step of all ranks needs.
    """

    def __init__(self, contexts: Contexts, *, batch_size: int, rank: int, size: int, seed: int) -> None:
        texts = contexts.texts
        try:
            shards = ShardedBatches(len(texts), batch_size=batch_size, rank=rank, size=size, seed=seed)
        except DataError as error:
            raise DataError(f"{texts.path}: {error}") from error
        super().__init__(shards, CONTEXTS)
        self.contexts = contexts

    def to(self, device: torch.device) -> None:
        self.contexts.to(device)

    def batch(self, epoch: int, step: int) -> ContextBatch:
        samples = self.shards.indices(epoch, step)
        return self.contexts.cut(samples, self.draws(epoch)[samples])


class ContextEvaluationLoader:
    """One rank's part of the held-out split in order, every sequence once over all ranks, always with the same contexts.

    Args:
        contexts: of the held-out split.
        batch_size, rank, size, most: as data.text.masking.TextEvaluationLoader.
    """

    def __init__(self, contexts: Contexts, *, batch_size: int, rank: int, size: int, most: int = 0) -> None:
        total, place = len(contexts.texts), {"batch_size": batch_size, "rank": rank, "size": size}
        self.contexts = contexts
        self._draws = epoch_draws(total, 0, 0, CONTEXTS)
        self._batches = list(evaluation_batches(total, most=most, **place))

    def to(self, device: torch.device) -> None:
        self.contexts.to(device)

    def __iter__(self) -> Iterator[ContextBatch]:
        return (self.contexts.cut(samples, self._draws[samples]) for samples in self._batches)
