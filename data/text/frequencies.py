"""The loss of a model that knows word frequencies alone: an upper bound for any trained model."""

from __future__ import annotations

import numpy as np

from data.text.file import TextSet
from data.text.masking import IGNORED, TextEvaluationLoader

SAMPLED = 1 << 14
"""Training sequences that are counted at most, spread evenly."""


def frequency_loss(training: TextSet, held_out: TextEvaluationLoader) -> float:
    """Mean cross entropy of the masked words under the frequencies of the training words, in nats.

    Args:
        training: what is counted; [PAD], [CLS] and [SEP], which are never masked, are not. Every other word counts one more.
        held_out: all of what is scored, on one rank.
    """
    tokens = training.sequences.tokens[:: -(-len(training) // SAMPLED)]
    counts = 1.0 + np.bincount(np.asarray(tokens).ravel(), minlength=len(training.vocabulary))
    counts[[training.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")]] = 0.0
    labels = np.concatenate([batch.labels.flatten().numpy() for batch in held_out])
    return float(np.log(counts.sum()) - np.log(counts[labels[labels != IGNORED]]).mean())
