"""Batches for word embeddings: pairs of adjacent words, a word that stands beside each, and words drawn at random."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import EpochLoader, HeldOut, HeldOutPlace, Place
from data.sharding import CONTEXTS, ShardedBatches, epoch_draws, evaluation_batches
from data.text.file import TextSet
from data.text.masking import GOLDEN, POSITIVE, mixed
from data.text.tokens import Tokens

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


class Contexts(Tokens):
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
        super().__init__(texts)
        self._rows, self._window = rows, window
        self._apart = [texts.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")]
        chances = np.cumsum(counts**_POWER)
        self._ends = torch.from_numpy(np.ceil(chances / chances[-1] * _CHANCES).astype(np.int64))
        self._draws = GOLDEN * (torch.arange(negatives) + 2)

    def cut(self, plan: tuple[NDArray[np.int64], NDArray[np.uint64]]) -> ContextBatch:
        """A batch.

        Args:
            plan: int64[batch], sequences of the split, and uint64[batch], 64 random bits for each.
        """
        samples, draws = plan
        tokens = self.tokens(torch.tensor(samples, device=self.device))
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
        valid = inside & present & present.roll(-1, dims=1) & present.gather(1, at)
        pairs = tokens[valid] * len(self.texts.vocabulary) + following[valid]
        centers = (mixed(pairs) & POSITIVE) % self._rows
        drawn = mixed(random[valid][:, None] + self._draws) & (_CHANCES - 1)
        negatives = torch.searchsorted(self._ends, drawn, right=True)
        return ContextBatch(centers, torch.cat([tokens.gather(1, at)[valid][:, None], negatives], dim=1))


class ContextTrainingLoader(EpochLoader[ContextBatch]):
    """One rank's training batches, with other contexts in every epoch.

    Args:
        contexts: of the training split.
        place: of this rank.

    Raises:
        DataError: fewer sequences than ranks, or than one step of all ranks needs.
    """

    def __init__(self, contexts: Contexts, **place: Unpack[Place]) -> None:
        texts = contexts.texts
        super().__init__(ShardedBatches(len(texts), where=texts.path, **place), CONTEXTS)
        self.contexts = contexts

    def to(self, device: torch.device) -> None:
        self.contexts.to(device)

    def batch(self, epoch: int, step: int) -> ContextBatch:
        samples = self.shards.indices(epoch, step)
        return self.contexts.cut((samples, self.draws(epoch)[samples]))


class ContextEvaluationLoader(HeldOut[ContextBatch]):
    """One rank's part of the held-out split in order, every sequence once over all ranks, always with the same contexts.

    Args:
        contexts: of the held-out split.
        most, place: as data.text.masking.TextEvaluationLoader.
    """

    def __init__(self, contexts: Contexts, *, most: int = 0, **place: Unpack[HeldOutPlace]) -> None:
        total = len(contexts.texts)
        draws, batches = epoch_draws(total, 0, 0, CONTEXTS), evaluation_batches(total, most=most, **place)
        super().__init__(contexts, contexts.cut, ((samples, draws[samples]) for samples in batches))
