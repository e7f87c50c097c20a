"""From CTC's scores to text, and from texts to error rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jiwer
import numpy as np
from numpy.typing import NDArray

from data.speech.dataset import decoded

BLANK = 0


@dataclass(frozen=True)
class Errors:
    """Counts over some utterances; those of disjoint parts add up.

    word_errors are substitutions, deletions and insertions, which together may be more than words; characters alike.
    """

    word_errors: int
    words: int
    character_errors: int
    characters: int

    @property
    def word_error_rate(self) -> float:
        """word_errors / words."""
        return self.word_errors / self.words

    @property
    def character_error_rate(self) -> float:
        """character_errors / characters, spaces among them."""
        return self.character_errors / self.characters


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """Compare texts, by the library jiwer.

    Args:
        references: what was said, none of them empty.
        hypotheses: what was heard, one for each.

    Raises:
        ValueError: an empty reference, or another number of hypotheses.
    """
    if len(references) != len(hypotheses):
        raise ValueError(f"{len(hypotheses)} hypotheses are not {len(references)}, one for each reference")
    if not references:
        return Errors(0, 0, 0, 0)
    if not all(references):
        raise ValueError(f"reference {list(references).index('')} is empty")
    words = jiwer.process_words(list(references), list(hypotheses))
    characters = jiwer.process_characters(list(references), list(hypotheses))
    return Errors(
        words.substitutions + words.deletions + words.insertions,
        words.substitutions + words.deletions + words.hits,
        characters.substitutions + characters.deletions + characters.insertions,
        characters.substitutions + characters.deletions + characters.hits,
    )


def decode(log_probabilities: NDArray[np.float32], beam: int = 1) -> str:
    """The text of one utterance, without spaces at its ends.

    Args:
        log_probabilities: float32[frames, labels], of data.speech.dataset.ALPHABET.
        beam: prefixes to follow; 1 takes the likeliest label of each frame.

    Raises:
        ValueError: beam < 1.
    """
    if beam < 1:
        raise ValueError(f"beam {beam} is not at least 1")
    labels = greedy(log_probabilities) if beam == 1 else beam_search(log_probabilities, beam)
    return " ".join(decoded(np.array(labels, np.int64)).split())


def greedy(log_probabilities: NDArray[np.float32]) -> list[int]:
    """The likeliest label of each frame, repetitions merged, blanks dropped."""
    best = log_probabilities.argmax(axis=1)
    starts = np.flatnonzero(np.diff(best, prepend=-1))
    return [int(label) for label in best[starts] if label != BLANK]


def beam_search(log_probabilities: NDArray[np.float32], beam: int) -> list[int]:
    """The likeliest labelling among those that a beam of so many prefixes finds, summed over its alignments.

    Exact when the beam holds all prefixes. No language model.
    Source: Graves & Jaitly, ICML 2014, algorithm 1.
    """
    # prefix -> log-probabilities of its alignments that end in a blank, and in its last label
    prefixes: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for frame in log_probabilities.astype(np.float64).tolist():
        # a label outside the frame's best `beam` could only win from a prefix that is nearly alone
        labels = sorted(range(1, len(frame)), key=frame.__getitem__, reverse=True)[: max(beam, 2)]
        found: dict[tuple[int, ...], list[float]] = {}
        for prefix, (blank, label_end) in prefixes.items():
            total = float(np.logaddexp(blank, label_end))
            same = found.setdefault(prefix, [-np.inf, -np.inf])
            same[0] = float(np.logaddexp(same[0], total + frame[BLANK]))
            if prefix:
                same[1] = float(np.logaddexp(same[1], label_end + frame[prefix[-1]]))
            for label in labels:
                before = blank if prefix and label == prefix[-1] else total
                longer = found.setdefault((*prefix, label), [-np.inf, -np.inf])
                longer[1] = float(np.logaddexp(longer[1], before + frame[label]))
        ranked = sorted(found.items(), key=lambda item: (-np.logaddexp(item[1][0], item[1][1]), item[0]))
        prefixes = {prefix: (ends[0], ends[1]) for prefix, ends in ranked[:beam]}
    return list(next(iter(prefixes)))
