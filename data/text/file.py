"""The HDF5 layout of packed text: written whole or not at all, mapped into memory by its readers.

/               attributes: format, version, name, source, key (of what it was made from)
/vocabulary     str[V], in the order of their numbers
/train, /test   attribute: crc32, of the bytes of the three that follow
    tokens      uint16[N, length], contiguous
    spans       uint16[N, 2]      see data.text.packing.Sequences
    follows     int8[N]
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from data import DataError
from data.prepared_file import SPLITS, check_sum, created, mapped, opened
from data.text.packing import DOES_NOT_FOLLOW, NO_PAIR, SHORTEST, Sequences

FORMAT, VERSION = "oktopk-text", 1
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MOST_WORDS = 1 << 16
BLOCK = 10_000
_TYPES = {"tokens": np.uint16, "spans": np.uint16, "follows": np.int8}


@dataclass(frozen=True)
class TextSet:
    """One split of packed text, with its vocabulary.

    Attributes:
        sequences: of one length; tokens may be mapped.
        vocabulary: the words, in the order of their numbers.
        path: of the file, for messages.
        name, source: of the corpus, in words.
        key: of what it was made from.
    """

    sequences: Sequences
    vocabulary: tuple[str, ...]
    path: str
    name: str = ""
    source: str = ""
    key: str = ""

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
    key: str,
    vocabulary: Sequence[str],
    counts: dict[str, int],
    length: int,
    parts: Iterator[dict[str, Sequences]],
) -> None:
    """Write packed text beside its place and rename it there when it is whole.

    Args:
        path: of the file; a file there is replaced.
        name, source, key, vocabulary: as in TextSet.
        counts: sequences of "train" and of "test" in all parts together.
        length: tokens of a sequence.
        parts: sequences of both splits each.

    Raises:
        DataError: a split without sequences.
    """
    for split in SPLITS:
        if counts[split] < 1:
            raise DataError(f"{path}: {counts[split]} sequences in split {split!r}, not at least 1")
    with created(path, format=FORMAT, version=VERSION, name=name, source=source, key=key) as file:
        file.create_dataset("vocabulary", data=list(vocabulary), dtype=h5py.string_dtype())
        for split in SPLITS:
            for column, shape in (("tokens", (length,)), ("spans", (2,)), ("follows", ())):
                file.create_dataset(f"{split}/{column}", (counts[split], *shape), _TYPES[column])
        start = dict.fromkeys(SPLITS, 0)
        for part in parts:
            for split, sequences in part.items():
                here = slice(start[split], start[split] + len(sequences))
                for column in _TYPES:
                    file[f"{split}/{column}"][here] = getattr(sequences, column)
                start[split] = here.stop
        for split in SPLITS:
            file[split].attrs["crc32"] = split_checksum(file[split])


def open_text_file(path: str | Path, *, verify: bool = False) -> tuple[TextSet, TextSet]:
    """Open packed text that data.prepare wrote.

    The tokens are mapped, not read: the ranks of one host share one copy, in the page cache.

    Args:
        path: of the HDF5 file.
        verify: read everything and compare checksums; else only what is small is checked.

    Returns:
        The training and the held-out split.

    Raises:
        DataError: no such file, truncated, not HDF5, of another layout, contents that do not fit it, or (with
            verify) changed bytes.
    """
    path = Path(path)
    with opened(path, "text", FORMAT, VERSION) as file:
        vocabulary = tuple(file["vocabulary"].asstr()[:])
        check_vocabulary(vocabulary, str(path))
        train, test = (
            TextSet(
                _read_split(file, path, split, verify, len(vocabulary)),
                vocabulary,
                str(path),
                str(file.attrs["name"]),
                str(file.attrs["source"]),
                str(file.attrs["key"]),
            )
            for split in SPLITS
        )
    if train.length != test.length:
        raise DataError(
            f"{path}: held-out sequences of {test.length} tokens, training ones of {train.length}"
        )
    return train, test


def _read_split(file: h5py.File, path: Path, split: str, verify: bool, words: int) -> Sequences:
    group = file[split]
    if verify:
        check_sum(group, split_checksum(group))
    for column, kind in _TYPES.items():
        if group[column].dtype != kind or len(group[column]) != len(group["tokens"]):
            raise DataError(
                f"{path}, split {split!r}: {column} are {group[column].dtype}[{len(group[column])}], "
                f"not {np.dtype(kind)}[{len(group['tokens'])}]"
            )
    stored, spans, follows = group["tokens"], group["spans"][:], group["follows"][:]
    if stored.ndim != 2:
        raise DataError(f"{path}, split {split!r}: tokens of {stored.ndim} dimensions are not of 2")
    length = stored.shape[1]
    if len(stored) < 1 or length < SHORTEST:
        raise DataError(
            f"{path}, split {split!r}: {len(stored)} sequences of {length} tokens, not at least 1 of {SHORTEST}"
        )
    if spans.shape != (len(stored), 2) or not (
        np.all(spans[:, 0] >= 2) and np.all(spans[:, 0] <= spans[:, 1]) and np.all(spans[:, 1] <= length)
    ):
        raise DataError(f"{path}, split {split!r}: spans that are not ascending in [2, {length}]")
    if not np.all((follows >= NO_PAIR) & (follows <= DOES_NOT_FOLLOW)):
        raise DataError(f"{path}, split {split!r}: follows that are not in [{NO_PAIR}, {DOES_NOT_FOLLOW}]")
    # copy on write: torch wants what it wraps to be writable, and the file stays as it is
    tokens = mapped(stored, "c")
    if verify:
        largest = max(int(tokens[start : start + BLOCK].max()) for start in range(0, len(tokens), BLOCK))
        if largest >= words:
            raise DataError(f"{path}, split {split!r}: word {largest} is not in a vocabulary of {words}")
    return Sequences(tokens, spans, follows)


def split_checksum(group: h5py.Group) -> int:
    """CRC-32 of a split: the bytes of all tokens, spans and follows, little-endian."""
    checksum = 0
    for column, kind in _TYPES.items():
        for start in range(0, len(group[column]), BLOCK):
            block = np.ascontiguousarray(group[column][start : start + BLOCK])
            checksum = zlib.crc32(block.astype(np.dtype(kind).newbyteorder("<")).tobytes(), checksum)
    return checksum
