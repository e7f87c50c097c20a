"""Packed text: nothing lost or invented on the way from files to batches, and bad files named."""

import random
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from data import DataError
from data.prepare import main
from data.text import prepare as text
from data.text.file import SPECIAL, TextSet, open_text_file
from data.text.loader import IGNORED, MaskedText, NextTokens
from data.text.packing import FOLLOWS, Frame, Packer, Sequences, contiguous
from data.text.prepare import Recipe, prepare_text, read_documents, split_sentences
from tests.data.test_loaders import WORDS, text_set

FRAME = Frame(16, pad=0, cls=2, sep=3)


def corpus(folder: Path, documents: int = 60) -> Path:
    folder.mkdir()
    drawn = random.Random(1)
    nouns = ["cat", "dog", "house", "river", "stone", "child", "king", "ship"]
    for name in ("first.txt", "second.txt"):
        lines = []
        for _ in range(documents // 2):
            for _ in range(drawn.randint(1, 9)):
                lines.append(f"The {drawn.choice(nouns)} saw a {drawn.choice(nouns)}. It ran!")
            lines.append("")
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_blank_lines_part_documents_and_every_byte_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    content = "\ufeffOne. Two\nlines.\r\n \n\n\nThe \u00e9nd"
    path.write_text(content, encoding="utf-8", newline="")
    documents = list(read_documents(path))
    assert [document for document, _ in documents] == ["One. Two lines.", "The \u00e9nd"]
    assert sum(nbytes for _, nbytes in documents) == path.stat().st_size


def test_sentences_end_where_a_capital_follows() -> None:
    found = split_sentences('It was 3.5 km. "Go!" he said. \u00c9mile left? No.')
    assert found == ["It was 3.5 km.", '"Go!" he said.', "\u00c9mile left?", "No."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"bad\.txt: no text in its 0 bytes"),
        (b"\n \n", r"bad\.txt: no text in its 3 bytes"),
        (b"ab\ncd\xff", r"bad\.txt: byte 5 is not UTF-8"),
        (b"a" * 70_000 + b"\n\0", r"bad\.txt: a zero byte after byte 70001"),
    ],
)
def test_empty_and_binary_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    folder = corpus(tmp_path / "text")
    (folder / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_text(folder, tmp_path / "out.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_text_that_cannot_be_used_leaves_nothing(tmp_path: Path) -> None:
    recipe = Recipe(length=32, vocabulary_size=60, held_out_files="no such name")
    with pytest.raises(DataError, match="no text is held out by 'no such name'"):
        prepare_text(corpus(tmp_path / "text"), tmp_path / "out.h5", recipe)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_sequences_hold_what_their_spans_say() -> None:
    packed = text_set().sequences
    assert {-1, 0, 1} == set(packed.follows.tolist())
    for row, (first, used), follows in zip(packed.tokens, packed.spans, packed.follows, strict=True):
        assert row[0] == 2
        assert row[first - 1] == 3 if follows >= 0 else first == used
        assert row[used - 1] == 3
        assert not row[used:].any()
        assert row[:used].all()
        assert (used > first) == (follows >= 0)


def test_lone_sentences_are_packed_whole_and_long_ones_cut() -> None:
    documents = [[list(range(5, 10))], [[20, 21]], [[30, 31, 32]], [list(range(100, 140))]]
    packed = Packer(FRAME, "").pack(documents)
    assert packed.tokens[0, :14].tolist() == [2, 5, 6, 7, 8, 9, 3, 20, 21, 3, 30, 31, 32, 3]
    words = [token for row in packed.tokens[1:] for token in row.tolist() if token >= 100]
    assert words == list(range(100, 140))
    assert packed.follows.tolist() == [-1] * len(packed)


def test_half_of_the_second_segments_follow() -> None:
    # every token tells its document and its place
    documents = [[[d * 200 + 5 + 2 * s, d * 200 + 6 + 2 * s] for s in range(90)] for d in range(40)]
    packed = Packer(FRAME, "x").pack(documents)
    following = 0
    for row, (first, used), follows in zip(packed.tokens, packed.spans, packed.follows, strict=True):
        if follows < 0:
            continue
        left, right = row[1 : first - 1].astype(int), row[first : used - 1].astype(int)
        same_document = (left[-1] - 5) // 200 == (right[0] - 5) // 200
        assert same_document == (follows == 0)
        following += follows == 0
    pairs = int((packed.follows >= 0).sum())
    assert pairs > 300
    assert 0.4 < following / pairs < 0.6


def test_the_second_segments_of_a_single_document_follow() -> None:
    drawn = random.Random(0)
    document = [[drawn.randint(5, 49) for _ in range(drawn.randint(1, 5))] for _ in range(400)]
    packed = Packer(FRAME, "s").pack([document])
    paired = packed.follows[packed.follows >= 0]
    assert len(paired) > 50
    assert (paired == FOLLOWS).all()


def test_no_sentence_is_lost_between_the_pairs() -> None:
    documents = [[[d * 200 + 5 + 2 * s] for s in range(60)] for d in range(5)]
    packed = Packer(FRAME, "y").pack(documents)
    assert set(packed.tokens.reshape(-1).tolist()) - {0, 2, 3} == {
        token for document in documents for sentence in document for token in sentence
    }


def test_contiguous_sequences_tell_each_token_the_next() -> None:
    documents = [[[5, 6, 7], [8]], [[9] * 20], [[10]], [[11] * 7]]
    text = [5, 6, 7, 8, 3, *[9] * 20, 3, 10, 3, *[11] * 7, 3]
    packed = contiguous(documents, FRAME)
    ends = packed.spans[:, 1].tolist()
    assert ends == [16, 16, 4] and (packed.follows == -1).all()
    assert [
        token for row, end in zip(packed.tokens.tolist(), ends, strict=True) for token in row[:end]
    ] == text
    texts = TextSet(packed, WORDS, "made.h5")
    shares = [b for rank in (0, 1) for b in NextTokens(texts).held_out(batch_size=2, rank=rank, size=2)]
    tokens, labels = (torch.cat(parts) for parts in zip(*shares, strict=True))
    assert tokens.tolist() == packed.tokens.tolist()
    for row, told, end in zip(tokens.tolist(), labels.tolist(), ends, strict=True):
        assert told == [*row[1:end], *[IGNORED] * (17 - end)]
    seen = {
        tuple(batch.tokens[0].tolist())
        for rank in range(3)
        for batch in NextTokens(texts).training(batch_size=1, rank=rank, size=3, seed=1).epoch(0)
    }
    assert seen == set(map(tuple, packed.tokens.tolist()))
    # a word that is left over has none behind it
    assert contiguous([[[5] * 16]], FRAME).tokens.tolist() == [[5] * 16]
    assert contiguous([], FRAME).tokens.shape == (0, 16)


def test_a_corpus_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = corpus(tmp_path / "text"), tmp_path / "out.h5"
    words = ["text", str(folder), "-o", str(output), "--length", "32", "--vocabulary-size", "60"]
    assert main(words) == 0
    assert "wrote 'text' of" in capsys.readouterr().out
    train, test = open_text_file(output)
    assert train.length == test.length == 32
    assert train.vocabulary[: len(SPECIAL)] == SPECIAL
    assert list(train.vocabulary[len(SPECIAL) :]) == sorted(set(train.vocabulary[len(SPECIAL) :]))
    assert len(train.vocabulary) <= 60
    assert len(train) > 5 * len(test) > 0
    spelled = {train.vocabulary[token] for token in np.unique(train.sequences.tokens)}
    assert {"the", "[CLS]", "[SEP]"} <= spelled
    assert "[UNK]" not in spelled
    assert [path.name for path in tmp_path.glob(".*")] == []
    assert main([*words, "--contiguous", "--force"]) == 0
    for split in open_text_file(output):
        assert (split.sequences.spans[:-1] == 32).all()
        assert "[CLS]" not in {split.vocabulary[token] for token in np.unique(split.sequences.tokens)}


def test_files_can_be_held_out_by_name(tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "text"), tmp_path / "out.h5"
    prepare_text(folder, output, Recipe(length=32, held_out_files="second*"))
    train, test = open_text_file(output)
    assert 0.5 < len(train) / len(test) < 2


def test_text_of_several_parts_is_packed_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PART_BYTES", 1000)
    words, packed = tmp_path / "words.txt", []
    words.write_text("\n".join([*SPECIAL, "the", "cat", "a", "."]))

    class Noted(Packer):
        def __init__(self, frame: Frame, seed: str) -> None:
            super().__init__(frame, seed)
            self.seed = seed

        def pack(self, documents: Sequence[Sequence[Sequence[int]]]) -> Sequences:
            packed.append((self.seed, super().pack(documents)))
            return packed[-1][1]

    monkeypatch.setattr(text, "Packer", Noted)
    prepare_text(corpus(tmp_path / "text"), tmp_path / "out.h5", Recipe(length=32, vocabulary=words))
    assert len(packed) > 6
    for split, found in zip(("train", "test"), open_text_file(tmp_path / "out.h5"), strict=True):
        parts = [part for seed, part in packed if seed.endswith(split)]
        for column in ("tokens", "spans", "follows"):
            expected = np.concatenate([getattr(part, column) for part in parts])
            assert np.array_equal(getattr(found.sequences, column), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"text", "words.txt", "out.h5"}


@pytest.mark.timeout(20)
def test_text_without_spaces_is_no_word_to_learn(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "text")
    (folder / "endless.txt").write_text("a" * 1_000_000 + " dog.\n")
    prepare_text(folder, tmp_path / "a.h5", Recipe(length=32))
    train, _ = open_text_file(tmp_path / "a.h5")
    assert max(map(len, train.vocabulary)) < 10


def test_a_vocabulary_is_taken_as_it_is(tmp_path: Path) -> None:
    folder, output, file = corpus(tmp_path / "text"), tmp_path / "out.h5", tmp_path / "words.txt"
    file.write_text("\n".join([*SPECIAL, "the", "cat"]) + "\n", encoding="utf-8")
    prepare_text(folder, output, Recipe(length=32, vocabulary=file))
    assert open_text_file(output)[0].vocabulary == (*SPECIAL, "the", "cat")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["the", "[PAD]"],
            r"words\.txt: the vocabulary of 2 words lacks \[UNK\], \[CLS\], \[SEP\], \[MASK\]",
        ),
        ([*SPECIAL, "the", "a", "the"], r"words\.txt: the vocabulary has the word 'the' more than once"),
        ([*SPECIAL, *map(str, range(65_536))], r"words\.txt: 65541 words .* more than 65536"),
    ],
)
def test_a_vocabulary_of_no_use_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    file = tmp_path / "words.txt"
    file.write_text("\n".join(words), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        prepare_text(corpus(tmp_path / "text"), tmp_path / "o.h5", Recipe(vocabulary=file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 7}, "length 7 is not at least 8"),
        ({"vocabulary_size": 5}, r"vocabulary_size 5 is not in \[6, 65536\]"),
        ({"held_out": 1.0}, r"held_out 1.0 is not in \(0, 1\)"),
    ],
)
def test_impossible_recipes_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Recipe(**arguments)


def test_damage_to_a_file_is_found(tmp_path: Path) -> None:
    folder, output = corpus(tmp_path / "text"), tmp_path / "out.h5"
    prepare_text(folder, output, Recipe(length=32))
    whole = output.read_bytes()
    with h5py.File(output, "r+") as file:
        file["train/spans"][0, 1] = 33
    with pytest.raises(DataError, match=r"spans that are not ascending in \[2, 32\]"):
        open_text_file(output)
    output.write_bytes(whole)
    with h5py.File(output, "r+") as file:
        flat = file["train/tokens"][:].reshape(-1)[: len(file["train/spans"])]
        del file["train/tokens"]
        file["train/tokens"] = flat
    with pytest.raises(DataError, match="split 'train': tokens of 1 dimensions are not of 2"):
        open_text_file(output)


def test_fifteen_percent_of_words_are_told_most_masked() -> None:
    texts = text_set(count=600, length=128)
    fates = np.zeros(3)
    told = words = 0
    for batch in MaskedText(texts).training(batch_size=8, rank=0, size=1, seed=1).epoch(0):
        asked = batch.labels != IGNORED
        assert asked.any(1).all()
        here = batch.tokens.gather(1, batch.places)[asked]
        labels = batch.labels[asked]
        assert (labels >= 5).all(), "no special word is to be told"
        fates += [(here == 4).sum(), ((here != 4) & (here != labels)).sum(), (here == labels).sum()]
        told += int(asked.sum())
        words += int((batch.present & (batch.tokens != 2) & (batch.tokens != 3)).sum())
    assert told / words == pytest.approx(0.15, abs=0.01)
    assert fates / told == pytest.approx([0.8, 0.1, 0.1], abs=0.03)


def test_outside_of_the_places_nothing_changes() -> None:
    texts = text_set()
    loader = MaskedText(texts).training(batch_size=4, rank=0, size=1, seed=1)
    for step, batch in enumerate(loader.epoch(3)):
        original = torch.from_numpy(texts.sequences.tokens[loader.shards.indices(3, step)].astype(np.int64))
        told = torch.where(batch.labels != IGNORED, batch.labels, batch.tokens.gather(1, batch.places))
        assert torch.equal(batch.tokens.scatter(1, batch.places, told), original)
        spans = texts.sequences.spans[loader.shards.indices(3, step)]
        assert batch.present.sum(1).tolist() == spans[:, 1].tolist()
        assert batch.segments.sum(1).tolist() == (spans[:, 1] - spans[:, 0]).tolist()
        follows = texts.sequences.follows[loader.shards.indices(3, step)].astype(int)
        assert batch.follows.tolist() == [IGNORED if one < 0 else one for one in follows]


def test_words_beyond_the_signed_range_come_back() -> None:
    tokens = np.array([[2, 65_535, 40_000, 7, 9, 11, 13, 3]], np.uint16)
    packed = Sequences(tokens, np.array([[8, 8]], np.uint16), np.array([-1], np.int8))
    vocabulary = (*SPECIAL, *map(str, range(65_531)))
    batch = next(iter(MaskedText(TextSet(packed, vocabulary, "")).held_out(batch_size=1, rank=0, size=1)))
    told = torch.where(batch.labels != IGNORED, batch.labels, batch.tokens.gather(1, batch.places))
    assert batch.tokens.scatter(1, batch.places, told)[0].tolist() == tokens[0].tolist()
