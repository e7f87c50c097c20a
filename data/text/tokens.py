"""Packed text on any device, and its batches for the next token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import Batch, Source
from data.text.file import TextSet

IGNORED = -100


class Tokens(Source[Batch]):
    """The tokens of a split; on the host they stay mapped.

    Args:
        texts: one split.
    """

    def __init__(self, texts: TextSet) -> None:
        super().__init__(len(texts), f"{texts.path}: {len(texts)} sequences", texts.path)
        self.texts = texts
        self._apart = [texts.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")]
        # torch cannot index uint16 everywhere; the sign is taken off after the cut
        self._tokens = torch.from_numpy(texts.sequences.tokens.view(np.int16))
        self._columns = torch.arange(texts.length)

    def tokens(self, samples: torch.Tensor) -> torch.Tensor:
        """int64[batch, length] of int64[batch] sequences, on the device."""
        return self._tokens[samples].long() & 0xFFFF

    def plan(self, samples: NDArray[np.int64], draws: NDArray[np.uint64]) -> torch.Tensor:
        """int64[2, batch], on the device: sequences of the split, and 64 random bits for each."""
        return self.placed(np.stack([samples, draws.view(np.int64)]))

    def are_words(self, tokens: torch.Tensor) -> torch.Tensor:
        """bool[batch, length]: not [PAD], [CLS] or [SEP]."""
        words = torch.ones_like(tokens, dtype=torch.bool)
        for special in self._apart:
            words &= tokens != special
        return words


class TokenBatch(NamedTuple):
    """A batch for the next token.

    Attributes:
        tokens: int64[batch, length].
        labels: int64[batch, length]: what follows each token; IGNORED behind the last one and where a sequence is padded.
    """

    tokens: torch.Tensor
    labels: torch.Tensor


class NextTokens(Tokens[TokenBatch]):
    """Sequences with what follows each token; arguments as Tokens."""

    def __init__(self, texts: TextSet) -> None:
        super().__init__(texts)
        self._ends = torch.from_numpy(texts.sequences.spans[:, 1].astype(np.int64))

    def cut(self, samples: NDArray[np.int64], draws: NDArray[np.uint64] | None = None) -> TokenBatch:
        chosen = self.placed(samples)
        tokens = self.tokens(chosen)
        behind = self._columns >= self._ends[chosen, None] - 1
        return TokenBatch(tokens, tokens.roll(-1, dims=1).masked_fill(behind, IGNORED))
