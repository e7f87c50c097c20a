"""Decoding, and error rates against counts by hand."""

from __future__ import annotations

import numpy as np

from data.speech.file import ALPHABET, decoded, encoded
from jobs.train.tasks.speech import count_errors, decode


def test_greedy_merges_repetitions_and_keeps_what_a_blank_parts() -> None:
    path = np.array([0, 3, 3, 0, 3, 5, 5, 0, 0])
    assert decode(np.eye(6, dtype=np.float32)[path]) == decoded(np.array([3, 3, 5]))


def test_clear_scores_are_read_as_the_text_they_spell() -> None:
    path = [label for label in encoded("HELLO  'T ALL", "") for label in (label, 0)]
    path = [ALPHABET.index(" "), 0, *path]
    scores = np.log(np.eye(29, dtype=np.float32)[path] + 1e-4)
    assert decode(scores) == "HELLO 'T ALL"


def test_errors_are_substitutions_deletions_and_insertions() -> None:
    wrong_words, words, wrong_characters, characters = count_errors(["A B C", "YES"], ["A X C D", ""])
    assert (wrong_words, words, wrong_characters, characters) == (3, 4, 6, 8)
