"""AN4 from its published layout into the speech file, and what is refused on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from data import DataError
from data.prepare import main
from data.speech.file import open_speech_file
from tests.utterances import spoken, write_an4, write_wave

TRAIN, TEST = ["YES", "GO ON", "C'EST A"], ["NO"]


def prepare(source: Path, output: Path, *options: str) -> int:
    return main(["an4", str(source), "-o", str(output), "--partial", *options])


def assert_holds_the_texts(path: Path) -> None:
    for split, texts in zip(open_speech_file(path), (TRAIN, TEST), strict=True):
        assert [split.transcript(number) for number in range(len(split))] == texts
        for number, text in enumerate(texts):
            heard = split.samples[split.offsets[number] : split.offsets[number + 1]]
            assert np.array_equal(heard, spoken(text, number))


def test_wave_files_become_the_speech_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_an4(tmp_path / "an4", TRAIN, TEST)
    assert prepare(tmp_path, tmp_path / "a.h5") == 0
    assert_holds_the_texts(tmp_path / "a.h5")
    assert "wrote 'an4' of 3 training and 1 test utterances" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.h5"]


@pytest.mark.parametrize("kind", ["<i2", ">i2"])
def test_raw_files_of_either_byte_order_become_the_same_file(tmp_path: Path, kind: str) -> None:
    write_an4(tmp_path / "raw", TRAIN, TEST, raw=kind)
    assert prepare(tmp_path / "raw", tmp_path / "a.h5") == 0
    assert_holds_the_texts(tmp_path / "a.h5")


def test_a_part_is_refused_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_an4(tmp_path / "an4", TRAIN, TEST)
    assert main(["an4", str(tmp_path / "an4"), "-o", str(tmp_path / "a.h5")]) == 1
    assert "3 utterances in split 'train' are not AN4's 948" in capsys.readouterr().err


def transcription(source: Path) -> Path:
    return source / "etc" / "an4_train.transcription"


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


FAULTS: list[tuple[Callable[[Path, Path], object], str]] = [
    (lambda s, w: write_wave(w, spoken("YES"), rate=8000), "u0-train.wav: 8000 Hz are not 16000"),
    (lambda s, w: write_wave(w, spoken("YES"), channels=2), "u0-train.wav: 2 channels are not 1"),
    (lambda s, w: write_wave(w, spoken("YES")[:0]), "u0-train.wav: 0 samples are not at least 1"),
    (lambda s, w: cut(w, 10), "u0-train.wav: .* the file is truncated"),
    (lambda s, w: w.write_bytes(w.read_bytes()[:20]), "u0-train.wav: not a whole WAV file"),
    # a chunk that says it is longer than the file
    (
        lambda s, w: w.write_bytes(w.read_bytes()[:36] + b"LIST\xf0\xff\xff\xff" + w.read_bytes()[36:]),
        "u0-train.wav: not a whole WAV file: it ends in its header",
    ),
    (lambda s, w: w.unlink(), "u0-train.wav: no such file, nor u0-train.raw"),
    (
        lambda s, w: edit(transcription(s), "YES", "Y3S"),
        "u0-train: '3' in the transcript 'Y3S' is not one of",
    ),
    (lambda s, w: edit(transcription(s), "YES", ""), "u0-train: the transcript is empty"),
    (lambda s, w: edit(transcription(s), "(u0-train)", ""), "transcription, line 1: .* is not a transcript"),
    (lambda s, w: edit(transcription(s), "u0", "u7"), "u0-train has no line in an4_train.transcription"),
    (lambda s, w: edit(transcription(s), "u1", "u0"), "line 2: u0-train is there more than once"),
    (lambda s, w: transcription(s).unlink(), "an4_train.transcription: No such file"),
    (lambda s, w: edit(s / "etc/an4_train.fileids", "s0/u2", "s0/u0"), "is there more than once"),
    (
        lambda s, w: edit(s / "etc/an4_test.fileids", "an4_test/s0/u0-test", "an4_train/s0/u0-train"),
        "an4_test.fileids: .*u0-train is there more than once, first in an4_train.fileids",
    ),
    (lambda s, w: edit(transcription(s), "YES", "STRAßE"), "'ß' in the transcript 'STRAßE' is not one of"),
    (lambda s, w: (s / "etc/an4_test.fileids").write_text(""), "an4_test.fileids: 0 utterances"),
    (lambda s, w: (s / "etc").rename(s / "other"), "etc: no such directory"),
]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_a_fault_in_the_source_is_named_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: int
) -> None:
    source = tmp_path / "an4"
    written = write_an4(source, TRAIN, TEST)
    damage, message = FAULTS[fault]
    damage(source, written["train"][0])
    assert prepare(source, tmp_path / "a.h5") == 1
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("*.h5")) and not list(tmp_path.glob(".*"))


def test_recordings_may_be_links_and_lists_begin_with_marks(tmp_path: Path) -> None:
    written = write_an4(tmp_path / "an4", TRAIN, TEST)
    for number, path in enumerate(written["train"]):
        path.rename(tmp_path / f"{number}.wav")
        path.symlink_to(tmp_path / f"{number}.wav")
    for path in (tmp_path / "an4" / "etc").iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert prepare(tmp_path / "an4", tmp_path / "a.h5") == 0
    assert_holds_the_texts(tmp_path / "a.h5")


def test_a_raw_file_of_half_a_sample_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = write_an4(tmp_path / "raw", TRAIN, TEST, raw="<i2")
    cut(written["test"][0], 1)
    assert prepare(tmp_path / "raw", tmp_path / "a.h5") == 1
    assert "u0-test.raw: 6399 bytes are not a multiple of 2" in capsys.readouterr().err


def test_a_wrong_label_or_offset_is_refused(tmp_path: Path) -> None:
    write_an4(tmp_path / "an4", TRAIN, TEST)
    assert prepare(tmp_path, tmp_path / "a.h5") == 0
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["train/labels"][4] = 29
    with pytest.raises(
        DataError, match=r"'train': utterance an4_train/s1/u1-train: label 29 is not in \[1, 29\)"
    ):
        open_speech_file(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["train/labels"][4] = 28
        file["train/offsets"][1] = 0
    with pytest.raises(DataError, match="u0-train: 0 samples are not at least 1"):
        open_speech_file(tmp_path / "a.h5")
