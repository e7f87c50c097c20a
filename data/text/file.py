"""HDF5 layout of packed text: written atomically, read through a memory map.

/               attributes: format, version, name, source
/vocabulary     str[V], in the order of their numbers
/train, /test   attribute: crc32, of the bytes of the three that follow
    tokens      uint16[N, length], contiguous
    spans       uint16[N, 2]      see data.text.packing.Sequences
    follows     int8[N]
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data import DataError
from data.prepared_file import Layout
from data.text.packing import DOES_NOT_FOLLOW, NO_PAIR, SHORTEST, Sequences

LAYOUT = Layout("text", "oktopk-text", 1, {"tokens": "<u2", "spans": "<u2", "follows": "|i1"})
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_WORDS = 1 << 16


@dataclass(frozen=True)
class TextSet:
    """One split of packed text, with its vocabulary.

    Attributes:
        sequences: of one length; tokens may be mapped.
        vocabulary: the words, in the order of their numbers.
        path: of the file, for messages.
        name, source: of the corpus, in words.
    """

    sequences: Sequences
    vocabulary: tuple[str, ...]
    path: str
    name: str = ""
    source: str = ""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def length(self) -> int:
        return int(self.sequences.tokens.shape[1])

    def number(self, word: str) -> int:
        return self.vocabulary.index(word)


def check_vocabulary(words: Sequence[str], where: str) -> None:
    """Refuse a vocabulary that cannot number words of packed text.

    Raises:
        DataError: a special word is missing, a word is there twice, or there are too many.
    """
    if missing := [word for word in SPECIAL if word not in words]:
        raise DataError(f"{where}: the vocabulary of {len(words)} words lacks {', '.join(missing)}")
    if len(words) > MOST_WORDS:
        raise DataError(f"{where}: {len(words)} words in the vocabulary are more than {MOST_WORDS}")
    if len(set(words)) < len(words):
        twice = next(word for place, word in enumerate(words) if word in words[:place])
        raise DataError(f"{where}: the vocabulary has the word {twice!r} more than once")


def write_text_file(
    path: Path,
    *,
    name: str,
    source: str,
    vocabulary: Sequence[str],
    counts: dict[str, int],
    length: int,
    parts: Iterable[tuple[str, Sequences]],
) -> None:
    """Write packed text beside its place and rename it there when it is whole.

    Args:
        path: of the file; a file there is replaced.
        name, source, vocabulary: as in TextSet.
        counts: sequences of "train" and of "test" in all parts together.
        length: tokens of a sequence.
        parts: some sequences of a split each.

    Raises:
        DataError: a split without sequences.
    """
    shapes = {
        split: {"tokens": (count, length), "spans": (count, 2), "follows": (count,)}
        for split, count in counts.items()
    }
    with LAYOUT.created(path, shapes, name=name, source=source) as file:
        file.create_dataset("vocabulary", data=list(vocabulary), dtype=h5py.string_dtype())
        LAYOUT.fill(file, ((split, None, vars(sequences)) for split, sequences in parts))


def open_text_file(path: str | Path) -> tuple[TextSet, TextSet]:
    """Open packed text that data.prepare wrote; result and errors as data.images.file.open_image_file's."""

    def build(group: h5py.Group, columns: dict[str, Any]) -> TextSet:
        vocabulary = tuple(group.file["vocabulary"].asstr()[:])
        check_vocabulary(vocabulary, "/vocabulary")
        name, source = columns.pop("name"), columns.pop("source")
        return TextSet(_checked(Sequences(**columns)), vocabulary, str(path), name, source)

    train, test = LAYOUT.read(Path(path), build)
    if train.length != test.length:
        raise DataError(
            f"{path}: held-out sequences of {test.length} tokens, training ones of {train.length}"
        )
    return train, test


def _checked(sequences: Sequences) -> Sequences:
    """The sequences of a split. Raises DataError: columns that do not fit together, spans or follows out of range."""
    tokens, spans, follows = sequences.tokens, sequences.spans, sequences.follows
    if tokens.ndim != 2:
        raise DataError(f"tokens of {tokens.ndim} dimensions are not of 2")
    count, length = tokens.shape
    if count < 1 or length < SHORTEST:
        raise DataError(f"{count} sequences of {length} tokens, not at least 1 of {SHORTEST}")
    if spans.shape != (count, 2) or not (
        np.all(spans[:, 0] >= 2) and np.all(spans[:, 0] <= spans[:, 1]) and np.all(spans[:, 1] <= length)
    ):
        raise DataError(f"spans that are not ascending in [2, {length}]")
    if follows.shape != (count,) or not np.all((follows >= NO_PAIR) & (follows <= DOES_NOT_FOLLOW)):
        raise DataError(f"follows that are not {count} in [{NO_PAIR}, {DOES_NOT_FOLLOW}]")
    return sequences
