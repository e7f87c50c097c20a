"""Packs documents of numbered words into sequences of a fixed length: as pairs of segments, or in the order of the text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data import DataError

FOLLOWS, DOES_NOT_FOLLOW, NO_PAIR = 0, 1, -1
SHORTEST = 8

Sentences = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Frame:
    """Length of a sequence, and the numbers of [PAD], [CLS] and [SEP]."""

    length: int
    pad: int
    cls: int
    sep: int

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            raise DataError(f"length {self.length} is not at least {SHORTEST}")


@dataclass(frozen=True)
class Sequences:
    """Packed sequences.

    Attributes:
        tokens: uint16[N, length], padded.
        spans: uint16[N, 2]: tokens up to and with the first segment's end, and to the last one's; equal without a pair.
        follows: int8[N]: FOLLOWS, DOES_NOT_FOLLOW or NO_PAIR.
    """

    tokens: NDArray[np.uint16]
    spans: NDArray[np.uint16]
    follows: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.tokens)


class Packer:
    """Packs the documents of a block.

    A document of several sentences becomes sequences of two segments: the second one is, with even odds, what follows
    the first in the document, or begins somewhere in another document of the block. Sentences that are alone in their document
    stand one after the other in sequences without a pair, each with a [SEP] at its end; what is longer than a
    sequence is cut.

    Args:
        frame: of the sequences.
        seed: of all that is drawn; what comes out is a function of it and of the documents.

    Source: Devlin et al., NAACL 2019, appendix A.2.
    """

    def __init__(self, frame: Frame, seed: str) -> None:
        self._frame = frame
        self._random = random.Random(seed)
        self._rows: list[list[int]] = []
        self._spans: list[tuple[int, int]] = []
        self._follows: list[int] = []
        self._alone: list[int] = []

    def pack(self, documents: Sequence[Sentences]) -> Sequences:
        """All sequences of some documents, each a list of sentences of at least one word, and nothing kept for later."""
        self._rows, self._spans, self._follows = [], [], []
        for number, document in enumerate(documents):
            if len(document) > 1:
                self._pairs(documents, number)
            else:
                self._lone([token for sentence in document for token in sentence])
        self._flush()
        frame = self._frame
        tokens = np.full((len(self._rows), frame.length), frame.pad, np.uint16)
        for row, words in zip(tokens, self._rows, strict=True):
            row[: len(words)] = words
        return Sequences(
            tokens, np.array(self._spans, np.uint16).reshape(-1, 2), np.array(self._follows, np.int8)
        )

    def _add(self, first: list[int], second: list[int], follows: int) -> None:
        row = [self._frame.cls, *first]
        self._spans.append((len(row), len(row) + len(second)))
        self._rows.append(row + second)
        self._follows.append(follows)

    def _lone(self, words: list[int]) -> None:
        room = self._frame.length - 2
        for start in range(0, len(words), room):
            piece = [*words[start : start + room], self._frame.sep]
            if len(self._alone) + len(piece) > room + 1:
                self._flush()
            self._alone += piece

    def _flush(self) -> None:
        if self._alone:
            self._add(self._alone, [], NO_PAIR)
            self._alone = []

    def _pairs(self, documents: Sequence[Sentences], number: int) -> None:
        document, room, begin = documents[number], self._frame.length - 3, 0
        while begin < len(document):
            stop = begin + 1
            words = len(document[begin])
            while stop < len(document) and words < room:
                words += len(document[stop])
                stop += 1
            if stop - begin < 2:
                self._lone(list(document[begin]))
                begin = stop
                continue
            middle = self._random.randint(begin + 1, stop - 1)
            first = _joined(document[begin:middle])
            if self._random.random() < 0.5 or len(documents) == 1:  # there is no other one
                second = _joined(document[middle:stop])
                follows, begin = FOLLOWS, stop
            else:
                # what was not used begins the next sequence
                second = self._elsewhere(documents, number, max(1, room - len(first)))
                follows, begin = DOES_NOT_FOLLOW, middle
            self._shorten(first, second, room)
            self._add([*first, self._frame.sep], [*second, self._frame.sep], follows)

    def _elsewhere(self, documents: Sequence[Sentences], number: int, room: int) -> list[int]:
        other = self._random.randrange(len(documents) - 1) if len(documents) > 1 else number
        document = documents[other + (other >= number and len(documents) > 1)]
        words: list[int] = []
        for sentence in document[self._random.randrange(len(document)) :]:
            words += sentence
            if len(words) >= room:
                break
        return words

    def _shorten(self, first: list[int], second: list[int], room: int) -> None:
        """Cut the longer segment, at either end, until both fit."""
        while (excess := len(first) + len(second) - room) > 0:
            longer, difference = (first, len(first) - len(second))
            if difference < 0:
                longer, difference = second, -difference
            cut = min(excess, difference) if difference else -(-excess // 2)
            front = self._random.randint(0, cut)
            del longer[:front]
            del longer[len(longer) - (cut - front) :]


def contiguous(documents: Sequence[Sentences], frame: Frame) -> Sequences:
    """All words of some documents one after the other, a [SEP] behind each document, cut into sequences without a pair.

    The last sequence is padded; a single word that is left over is dropped.
    """
    words = [token for document in documents for token in (*_joined(document), frame.sep)]
    if len(words) % frame.length == 1:
        del words[-1]
    starts = np.arange(0, len(words), frame.length)
    tokens = np.full((len(starts), frame.length), frame.pad, np.uint16)
    tokens.reshape(-1)[: len(words)] = words
    ends = np.minimum(len(words) - starts, frame.length).astype(np.uint16)
    return Sequences(tokens, np.stack([ends, ends], axis=1), np.full(len(starts), NO_PAIR, np.int8))


def _joined(sentences: Sentences) -> list[int]:
    return [token for sentence in sentences for token in sentence]
