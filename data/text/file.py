"""HDF5 layout of packed text: written atomically, read through a memory map.

/               attributes: format, version, name, source
/vocabulary     str[V], in the order of their numbers
/train, /test   attribute: crc32, of the bytes of the three that follow
    tokens      uint16[N, length], contiguous
    spans       uint16[N, 2]      see data.text.packing.Sequences
    follows     int8[N]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from data import DataError
from data.prepared_file import SPLITS, Layout, mapped
from data.text.packing import DOES_NOT_FOLLOW, NO_PAIR, SHORTEST, Sequences

LAYOUT = Layout("text", "oktopk-text", 1, {"tokens": "<u2", "spans": "<u2", "follows": "|i1"})
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_WORDS = 1 << 16
BLOCK = 10_000


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
    parts: Iterator[dict[str, Sequences]],
) -> None:
    """Write packed text beside its place and rename it there when it is whole.

    Args:
        path: of the file; a file there is replaced.
        name, source, vocabulary: as in TextSet.
        counts: sequences of "train" and of "test" in all parts together.
        length: tokens of a sequence.
        parts: sequences of both splits each.

    Raises:
        DataError: a split without sequences.
    """
    with LAYOUT.created(path, counts, name=name, source=source) as file:
        file.create_dataset("vocabulary", data=list(vocabulary), dtype=h5py.string_dtype())
        for split in SPLITS:
            for column, shape in (("tokens", (length,)), ("spans", (2,)), ("follows", ())):
                file.create_dataset(f"{split}/{column}", (counts[split], *shape), LAYOUT.columns[column])
        start = dict.fromkeys(SPLITS, 0)
        for part in parts:
            for split, sequences in part.items():
                here = slice(start[split], start[split] + len(sequences))
                for column in LAYOUT.columns:
                    file[f"{split}/{column}"][here] = getattr(sequences, column)
                start[split] = here.stop


def open_text_file(path: str | Path, *, verify: bool = False) -> tuple[TextSet, TextSet]:
    """Open packed text that data.prepare wrote; arguments, result and errors as data.images.file.open_image_file's."""
    path = Path(path)
    with LAYOUT.opened(path) as file:
        vocabulary = tuple(file["vocabulary"].asstr()[:])
        check_vocabulary(vocabulary, str(path))
        described = [str(file.attrs[name]) for name in ("name", "source")]

        def read(group: h5py.Group) -> TextSet:
            sequences = _sequences(group, len(vocabulary) if verify else 0)
            return TextSet(sequences, vocabulary, str(path), *described)

        train, test = LAYOUT.read(file, path, read, verify=verify)
    if train.length != test.length:
        raise DataError(
            f"{path}: held-out sequences of {test.length} tokens, training ones of {train.length}"
        )
    return train, test


def _sequences(group: h5py.Group, words: int) -> Sequences:
    """The sequences of a split; words: of the vocabulary, to compare all tokens with it; 0: they are not read."""
    count = len(group["tokens"])
    for column, kind in LAYOUT.columns.items():
        if group[column].dtype != kind or len(group[column]) != count:
            found = f"{group[column].dtype}[{len(group[column])}]"
            raise DataError(f"{column} are {found}, not {np.dtype(kind)}[{count}]")
    stored, spans, follows = group["tokens"], group["spans"][:], group["follows"][:]
    if stored.ndim != 2:
        raise DataError(f"tokens of {stored.ndim} dimensions are not of 2")
    length = stored.shape[1]
    if count < 1 or length < SHORTEST:
        raise DataError(f"{count} sequences of {length} tokens, not at least 1 of {SHORTEST}")
    if spans.shape != (count, 2) or not (
        np.all(spans[:, 0] >= 2) and np.all(spans[:, 0] <= spans[:, 1]) and np.all(spans[:, 1] <= length)
    ):
        raise DataError(f"spans that are not ascending in [2, {length}]")
    if not np.all((follows >= NO_PAIR) & (follows <= DOES_NOT_FOLLOW)):
        raise DataError(f"follows that are not in [{NO_PAIR}, {DOES_NOT_FOLLOW}]")
    # copy on write: torch wants what it wraps to be writable, and the file stays as it is
    tokens = mapped(stored, "c")
    if words:
        largest = max(int(tokens[start : start + BLOCK].max()) for start in range(0, count, BLOCK))
        if largest >= words:
            raise DataError(f"word {largest} is not in a vocabulary of {words}")
    return Sequences(tokens, spans, follows)
