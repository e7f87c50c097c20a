"""Batches for word embeddings: pairs of adjacent words, a word that stands beside each, and words drawn at random."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.sharding import CONTEXTS
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


class Contexts(Tokens[ContextBatch]):
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

    stream = CONTEXTS

    def __init__(
        self, texts: TextSet, counts: NDArray[np.float64], *, rows: int, window: int, negatives: int
    ) -> None:
        super().__init__(texts)
        self._rows, self._window = rows, window
        chances = np.cumsum(counts**_POWER)
        self._ends = torch.from_numpy(np.ceil(chances / chances[-1] * _CHANCES).astype(np.int64))
        self._draws = GOLDEN * (torch.arange(negatives) + 2)

    def cut(self, samples: NDArray[np.int64], draws: NDArray[np.uint64] | None = None) -> ContextBatch:
        assert draws is not None
        chosen, bits = self.plan(samples, draws)
        tokens = self.tokens(chosen)
        present = self.are_words(tokens)
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
