"""Reads plain text, documents that blank lines part, and packs it into sequences of numbered words."""

from __future__ import annotations

import fnmatch
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from data import DataError
from data.prepared_file import SPLITS
from data.text.file import (
    LAYOUT,
    MOST_WORDS,
    SPECIAL,
    TextSet,
    check_vocabulary,
    write_text_file,
)
from data.text.packing import Frame, Packer, Sequences, contiguous

# A full stop, or one and a closing quote, before a space and what can begin a sentence.
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)\]]))\s+(?=["'“‘(\[]?[^\W_a-z])""")


def text_files(source: Path) -> list[Path]:
    """The files of a corpus, in an order that does not depend on the file system.

    Args:
        source: a file, or a folder, searched with its subfolders; what begins with a dot is left out.

    Raises:
        DataError: no such source, or no file in it.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{source}: no such file or directory")
    files = [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)
    ]
    if not files:
        raise DataError(f"{source}: no file of text in it")
    return files


def read_documents(path: Path) -> Iterator[tuple[str, int]]:
    """The documents of a file: what stands between blank lines, its lines joined.

    Args:
        path: of UTF-8 text.

    Returns:
        An iterator over documents and the bytes read for each.

    Raises:
        DataError: not readable, empty, or binary: with a zero byte, or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            start, reported, lines, any_file = 0, 0, list[str](), False
            for line in file:
                text = _decoded(line, path, start).strip()
                start += len(line)
                if text:
                    lines.append(text)
                    any_file = True
                elif lines:
                    yield " ".join(lines), start - reported
                    reported, lines = start, []
            if lines:
                yield " ".join(lines), start - reported
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not any_file:
        raise DataError(f"{path}: no text in its {start} bytes")


def _decoded(line: bytes, path: Path, start: int) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {start + error.start} is not UTF-8: not plain text") from error
    if "\0" in text:
        raise DataError(f"{path}: a zero byte after byte {start}: a binary file, not plain text")
    return text.removeprefix("\ufeff")


def split_sentences(document: str) -> list[str]:
    """The sentences of a document; an abbreviation before a capital ends one as well."""
    return _SENTENCE_END.split(document)


if TYPE_CHECKING:
    from tokenizers import Tokenizer

# of text that is packed at a time: what segments of other documents come from
PART_BYTES = 4_000_000
# no word: the library needs the square of its length to train on it
_ENDLESS = re.compile(r"[^\W_]{1000,}")


@dataclass(frozen=True)
class Recipe:
    """Settings of packing.

    Args:
        length: tokens of a sequence, at least 8.
        vocabulary: a file with one word per line; None trains one on the training documents, in which the
            library breaks ties by chance: give the words of one file to others that are to agree with it.
        vocabulary_size: words of a trained one at most.
        held_out: part of the documents that is never trained on, in (0, 1), spread evenly.
        held_out_files: instead of it: the files whose names match this pattern.
        seed: of the pairs.
        contiguous: sequences of words as they stand in the text, a [SEP] behind each document, for models of the next token;
            else pairs of segments, half of them made up, for BERT.

    Raises:
        DataError: an argument out of bounds.
    """

    length: int = 128
    vocabulary: Path | None = None
    vocabulary_size: int = 30_522
    held_out: float = 0.05
    held_out_files: str = ""
    seed: int = 0
    contiguous: bool = False

    def __post_init__(self) -> None:
        Frame(self.length, 0, 0, 0)
        if not len(SPECIAL) < self.vocabulary_size <= MOST_WORDS:
            raise DataError(
                f"vocabulary_size {self.vocabulary_size} is not in [{len(SPECIAL) + 1}, {MOST_WORDS}]"
            )
        if not (math.isfinite(self.held_out) and 0.0 < self.held_out < 1.0):
            raise DataError(f"held_out {self.held_out} is not in (0, 1)")

    def splits(self, files: list[Path]) -> Iterator[tuple[str, str, int]]:
        """All documents of the files with their split and the bytes read for each. Raises DataError."""
        number = 0
        for path in files:
            for document, nbytes in read_documents(path):
                if self.held_out_files:
                    apart = fnmatch.fnmatch(path.name, self.held_out_files)
                else:
                    apart = math.floor((number + 1) * self.held_out) > math.floor(number * self.held_out)
                number += 1
                yield document, SPLITS[apart], nbytes


def prepare_text(source: Path, output: Path, recipe: Recipe = Recipe()) -> None:
    """Write a folder of plain text as packed sequences.

    Args:
        source: folder or file of UTF-8 text; a blank line ends a document.
        output: HDF5 file to write, in place of one that is there.
        recipe: how.

    Raises:
        DataError: a source or vocabulary that cannot be used; too little text.
    """
    files = text_files(source)
    total = sum(path.stat().st_size for path in files)
    vocabulary = read_vocabulary(recipe.vocabulary) if recipe.vocabulary else _trained(files, recipe, total)
    tokenizer = build_tokenizer(vocabulary)
    frame = Frame(recipe.length, *(vocabulary.index(word) for word in ("[PAD]", "[CLS]", "[SEP]")))
    counts, blocks = dict.fromkeys(SPLITS, 0), 0
    # how many sequences there are is known when all are packed: until then they are in a file without a name
    with tempfile.TemporaryFile(dir=output.parent) as packed:
        with tqdm(total=total, unit="B", unit_scale=True, desc="packing", disable=None) as bar:
            for documents, nbytes in _blocks(recipe.splits(files)):
                for split in SPLITS:
                    seed = f"{recipe.seed} {blocks} {split}"
                    sequences = _packed(tokenizer, documents[split], frame, recipe.contiguous, seed)
                    counts[split] += len(sequences)
                    for column in LAYOUT.columns:
                        np.save(packed, getattr(sequences, column))
                blocks += 1
                bar.update(nbytes)
        if not counts["test"]:
            how = recipe.held_out_files or f"a part of {recipe.held_out:g}"
            raise DataError(f"{source}: no text is held out by {how!r}: more documents, or another choice")
        packed.seek(0)
        write_text_file(
            output,
            **origin(source, recipe),
            vocabulary=vocabulary,
            counts=counts,
            length=recipe.length,
            parts=(
                (split, Sequences(**{column: np.load(packed) for column in LAYOUT.columns}))
                for _ in range(blocks)
                for split in SPLITS
            ),
        )


def origin(source: Path, recipe: Recipe) -> dict[str, str]:
    """Name and source, in words, of what `prepare_text` writes."""
    files, name = text_files(source), source.resolve().name
    chosen = {
        key: value for key, value in vars(recipe).items() if value not in (None, "") and value is not False
    }
    settings = ", ".join(f"{key} {value}" for key, value in chosen.items())
    nbytes = sum(path.stat().st_size for path in files)
    return {"name": name, "source": f"{len(files)} files of {name}, {nbytes} bytes, {settings}"}


def build_tokenizer(vocabulary: list[str]) -> Tokenizer:
    """Words into numbers: lower case, punctuation apart, the longest known pieces first (WordPiece)."""
    from tokenizers import Tokenizer, models

    numbers = {word: number for number, word in enumerate(vocabulary)}
    return _normalised(Tokenizer(models.WordPiece(numbers, unk_token="[UNK]")))


def _normalised(tokenizer: Tokenizer) -> Tokenizer:
    from tokenizers import normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _trained(files: list[Path], recipe: Recipe, total: int) -> list[str]:
    """A vocabulary that is trained on the training documents; total: bytes of the files."""
    from tokenizers import Tokenizer, models, trainers

    for _ in recipe.splits(files):
        pass  # a fault in the text would pass through the library as another error
    with tqdm(total=total, unit="B", unit_scale=True, desc="vocabulary", disable=None) as bar:

        def training() -> Iterator[str]:
            for document, split, nbytes in recipe.splits(files):
                bar.update(nbytes)
                if split == "train":
                    yield _ENDLESS.sub(" ", document)

        tokenizer = _normalised(Tokenizer(models.WordPiece(unk_token="[UNK]")))
        trainer = trainers.WordPieceTrainer(
            vocab_size=recipe.vocabulary_size, special_tokens=list(SPECIAL), show_progress=False
        )
        tokenizer.train_from_iterator(training(), trainer)
    numbers = tokenizer.get_vocab()
    # the library numbers even the same words otherwise in every call
    return [*SPECIAL, *sorted(numbers.keys() - set(SPECIAL))]


def read_vocabulary(path: Path) -> list[str]:
    """The words of a file, one per line. Raises DataError: not readable, or of no use."""
    try:
        words = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a file of words: {error}") from error
    check_vocabulary(words, str(path))
    return words


def _blocks(documents: Iterator[tuple[str, str, int]]) -> Iterator[tuple[dict[str, list[str]], int]]:
    block: dict[str, list[str]] = {split: [] for split in SPLITS}
    filled = 0
    for document, split, nbytes in documents:
        block[split].append(document)
        filled += nbytes
        if filled >= PART_BYTES:
            yield block, filled
            block, filled = {split: [] for split in SPLITS}, 0
    if filled:
        yield block, filled


def _packed(tokenizer: Tokenizer, documents: list[str], frame: Frame, in_a_row: bool, seed: str) -> Sequences:
    sentences = [split_sentences(document) for document in documents]
    encoded = iter(
        tokenizer.encode_batch([one for document in sentences for one in document], add_special_tokens=False)
    )
    # a sentence of nothing that the vocabulary can number has no tokens
    numbered = [[ids for _ in document if (ids := next(encoded).ids)] for document in sentences]
    kept = [document for document in numbered if document]
    return contiguous(kept, frame) if in_a_row else Packer(frame, seed).pack(kept)


def description(train: TextSet, test: TextSet) -> str:
    """Packed text in words."""
    used = 100 * float(train.sequences.spans[:, 1].mean()) / train.length
    paired = 100 * float((train.sequences.follows >= 0).mean())
    return (
        f"{train.name!r} of {len(train)} training and {len(test)} held-out sequences of {train.length} tokens "
        f"({used:.0f} % used, {paired:.0f} % pairs), {len(train.vocabulary)} words"
    )
