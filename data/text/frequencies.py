"""The loss of a model that knows word frequencies alone: an upper bound for any trained model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data.batches import HeldOut
from data.text.file import TextSet
from data.text.loader import IGNORED, TextBatch

SAMPLED = 1 << 14
"""Training sequences that are counted at most, spread evenly."""


def word_counts(training: TextSet) -> NDArray[np.float64]:
    """float64[words]: how often each word of the vocabulary stands in the counted sequences, and one more.

    [PAD], [CLS] and [SEP] have 0.
    """
    tokens = training.sequences.tokens[:: -(-len(training) // SAMPLED)]
    counts = (
        np.bincount(np.asarray(tokens).ravel(), minlength=len(training.vocabulary)).astype(np.float64) + 1.0
    )
    counts[[training.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")]] = 0.0
    return counts


def frequency_loss(training: TextSet, held_out: HeldOut[TextBatch]) -> float:
    """Mean cross entropy of the masked words under the frequencies of the training words, in nats.

    Args:
        training: what is counted, see `word_counts`; what it gives 0 is never masked.
        held_out: all of what is scored, on one rank.
    """
    counts = word_counts(training)
    labels = np.concatenate([batch.labels.flatten().numpy() for batch in held_out])
    return float(np.log(counts.sum()) - np.log(counts[labels[labels != IGNORED]]).mean())
