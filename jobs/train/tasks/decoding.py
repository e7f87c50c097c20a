"""Decodes CTC's scores to text, and counts errors between texts."""

from __future__ import annotations

from collections.abc import Sequence

import jiwer
import numpy as np
from numpy.typing import NDArray

from data.speech.file import decoded

BLANK = 0


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[int, int, int, int]:
    """Compare texts, by the library jiwer.

    Args:
        references: what was said, one or more, none of them empty.
        hypotheses: what was heard, one for each.

    Returns:
        Wrong words, words said, wrong characters, characters said. Errors are substitutions, deletions and insertions, which
        together may be more than words.
    """
    counts = []
    for compare in (jiwer.process_words, jiwer.process_characters):
        errors = compare(list(references), list(hypotheses))
        missed = errors.substitutions + errors.deletions
        counts += [missed + errors.insertions, missed + errors.hits]
    wrong_words, words, wrong_characters, characters = counts
    return wrong_words, words, wrong_characters, characters


def decode(log_probabilities: NDArray[np.float32]) -> str:
    """The text of one utterance, without spaces at its ends.

    Args:
        log_probabilities: float32[frames, labels], of data.speech.file.ALPHABET.
    """
    return " ".join(decoded(np.array(greedy(log_probabilities), np.int64)).split())


def greedy(log_probabilities: NDArray[np.float32]) -> list[int]:
    """The likeliest label of each frame, repetitions merged, blanks dropped."""
    best = log_probabilities.argmax(axis=1)
    starts = np.flatnonzero(np.diff(best, prepend=-1))
    return [int(label) for label in best[starts] if label != BLANK]
