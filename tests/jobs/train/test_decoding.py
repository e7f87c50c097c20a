"""Decoding against an enumeration of all alignments, and error rates against counts by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from data.speech.dataset import ALPHABET, encoded
from jobs.train.tasks.decoding import Errors, beam_search, count_errors, decode, greedy


def log_probabilities(seed: int, frames: int, labels: int) -> np.ndarray:
    scores = np.random.default_rng(seed).standard_normal((frames, labels))
    return (scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))).astype(np.float32)


def collapsed(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label)


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_of_all_prefixes_finds_the_likeliest_labelling(seed: int) -> None:
    scores = log_probabilities(seed, 5, 4)
    likelihoods: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(4), repeat=5):
        likelihood = float(np.exp(scores[np.arange(5), path].sum()))
        likelihoods[collapsed(path)] = likelihoods.get(collapsed(path), 0.0) + likelihood
    assert tuple(beam_search(scores, 1000)) == max(likelihoods, key=likelihoods.__getitem__)


def test_a_beam_sums_alignments_where_greedy_takes_the_best_one() -> None:
    # a blank is likeliest in each frame, yet an A somewhere is likelier than none
    scores = np.log(np.array([[0.6, 0.4, 1e-9], [0.6, 0.4, 1e-9]], np.float32))
    assert greedy(scores) == []
    assert beam_search(scores, 4) == [1]


def test_greedy_merges_repetitions_and_keeps_what_a_blank_parts() -> None:
    path = np.array([0, 3, 3, 0, 3, 5, 5, 0, 0])
    assert greedy(np.eye(6, dtype=np.float32)[path]) == [3, 3, 5]


@pytest.mark.parametrize("beam", [1, 4])
def test_clear_scores_are_read_as_the_text_they_spell(beam: int) -> None:
    path = [label for label in encoded("HELLO  'T ALL", "") for label in (label, 0)]
    path = [ALPHABET.index(" "), 0, *path]
    scores = np.log(np.eye(29, dtype=np.float32)[path] + 1e-4)
    assert decode(scores, beam) == "HELLO 'T ALL"


def test_a_beam_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="beam 0 is not at least 1"):
        decode(log_probabilities(0, 2, 29), 0)


def test_errors_are_substitutions_deletions_and_insertions() -> None:
    errors = count_errors(["A B C", "YES"], ["A X C D", ""])
    assert errors == Errors(word_errors=3, words=4, character_errors=6, characters=8)
    assert errors.word_error_rate == 0.75
    assert count_errors([], []) == Errors(0, 0, 0, 0)
    with pytest.raises(ValueError, match="reference 1 is empty"):
        count_errors(["A", ""], ["A", "A"])
    with pytest.raises(ValueError, match="0 hypotheses are not 1"):
        count_errors(["A"], [])
