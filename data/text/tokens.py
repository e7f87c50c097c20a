"""Packed text on any device, and its batches for the next token."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches import EpochLoader, HeldOut, HeldOutPlace, Place, Resident
from data.sharding import ORDER, ShardedBatches, evaluation_batches
from data.text.file import TextSet

IGNORED = -100


class Tokens(Resident):
    """The tokens of a split; on the host they stay mapped.

    Args:
        texts: one split.
    """

    def __init__(self, texts: TextSet) -> None:
        super().__init__(f"{texts.path}: {len(texts)} sequences")
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


class NextTokens(Tokens):
    """Sequences with what follows each token; arguments as Tokens."""

    def __init__(self, texts: TextSet) -> None:
        super().__init__(texts)
        self._ends = torch.from_numpy(texts.sequences.spans[:, 1].astype(np.int64))

    def cut(self, samples: NDArray[np.int64]) -> TokenBatch:
        """A batch of int64[batch] sequences of the split."""
        chosen = torch.tensor(samples, device=self.device)
        tokens = self.tokens(chosen)
        behind = self._columns >= self._ends[chosen, None] - 1
        return TokenBatch(tokens, tokens.roll(-1, dims=1).masked_fill(behind, IGNORED))


class TokenTrainingLoader(EpochLoader[TokenBatch]):
    """One rank's training batches, shuffled anew in every epoch.

    Args:
        texts: the training split.
        place: of this rank.

    Raises:
        DataError: fewer sequences than ranks, or than one step of all ranks needs.
    """

    def __init__(self, texts: TextSet, **place: Unpack[Place]) -> None:
        super().__init__(ShardedBatches(len(texts), where=texts.path, **place), ORDER)
        self._text = NextTokens(texts)

    def to(self, device: torch.device) -> None:
        self._text.to(device)

    def batch(self, epoch: int, step: int) -> TokenBatch:
        return self._text.cut(self.shards.indices(epoch, step))


class TokenEvaluationLoader(HeldOut[TokenBatch]):
    """One rank's part of the held-out split in order, every sequence once over all ranks.

    Args:
        texts: the held-out split.
        most, place: as data.text.masking.TextEvaluationLoader.
    """

    def __init__(self, texts: TextSet, *, most: int = 0, **place: Unpack[HeldOutPlace]) -> None:
        text = NextTokens(texts)
        super().__init__(text, text.cut, evaluation_batches(len(texts), most=most, **place))
