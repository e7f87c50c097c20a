"""Batches of packed text: for the next token, and for masked words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from data.batches import MASKING, Batch, Draws, Samples, Source
from data.text.file import TextSet

IGNORED = -100
PART = 0.15
BLOCK = 2**18
"""Tokens that are cut together, where a batch has fewer: all batches among them share the some hundred small kernels of it."""


class Tokens(Source[Batch]):
    """The tokens of a split; on the host they stay mapped.

    Args:
        texts: one split.
    """

    def __init__(self, texts: TextSet) -> None:
        super().__init__(len(texts), f"{texts.path}: {len(texts)} sequences", texts.path)
        self.texts = texts
        # torch cannot index uint16 everywhere; the sign is taken off after the cut
        self._tokens = torch.from_numpy(texts.sequences.tokens.view(np.int16))
        self._columns = torch.arange(texts.length)

    def tokens(self, samples: torch.Tensor) -> torch.Tensor:
        """int64[batch, length] of int64[batch] sequences, on the device."""
        return self._tokens[samples].long() & 0xFFFF


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

    def cut(self, samples: Samples, draws: Draws = None) -> TokenBatch:
        chosen = self.placed(samples)
        tokens = self.tokens(chosen)
        behind = self._columns >= self._ends[chosen, None] - 1
        return TokenBatch(tokens, tokens.roll(-1, dims=1).masked_fill(behind, IGNORED))


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


class MaskedText(Tokens[TextBatch]):
    """Packed text, from which batches are cut.

    15 % of a sequence's words (one at least) are to be predicted: 8 of 10 are replaced by [MASK], 1 by any word, 1 stays. Which
    ones, is a function of a random number per sequence, and the same on every device.

    Args:
        texts: one split.

    Memory: on the device, the split's tokens in 2 bytes each, and some 20 MB while a block of BLOCK tokens is cut.
    Source: Devlin et al., NAACL 2019.
    """

    stream = MASKING

    def __init__(self, texts: TextSet) -> None:
        super().__init__(texts)
        self.block = BLOCK // texts.length
        self.count = max(1, round(PART * texts.length))
        self._words = len(texts.vocabulary)
        self._mask = texts.number("[MASK]")
        self._apart = torch.tensor([texts.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")])
        sequences = texts.sequences
        self._spans = torch.from_numpy(sequences.spans.astype(np.int64))
        self._follows = torch.from_numpy(sequences.follows.astype(np.int64))

    def cut(self, samples: Samples, draws: Draws = None) -> TextBatch:
        assert draws is not None
        # 64 random bits for each sequence
        chosen, bits = self.placed(np.stack([samples, draws.view(np.int64)]))
        tokens = self.tokens(chosen)
        spans = self._spans[chosen]
        present = self._columns < spans[:, 1:]
        segments = ((self._columns >= spans[:, :1]) & present).long()
        words = present & ~torch.isin(tokens, self._apart)

        order = mixed(bits[:, None] + GOLDEN * (self._columns + 1)) & POSITIVE
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
        follows = self._follows[chosen]
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
