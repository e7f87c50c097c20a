"""Reads CMU AN4's published layout, and checks it file by file.

    etc/an4_train.fileids, etc/an4_test.fileids                a path below wav/ per line, without its ending
    etc/an4_train.transcription, etc/an4_test.transcription    <s> SO IT IS SPELT </s> (last part of the path)
    wav/**.wav or wav/**.raw                                   16 kHz, 16 bits, one channel; raw ones have no header

The publisher has the raw ones in both byte orders, and nothing in a file says which: in the other one it is far louder.
Source: http://www.speech.cs.cmu.edu/databases/an4
"""

import re
import wave
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.speech.file import RATE, encoded

COUNTS = {"train": 948, "test": 130}
LINE = re.compile(r"^\s*(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<name>[^()\s]+)\)\s*$")


@dataclass(frozen=True)
class Utterance:
    """One recording, as the files beside it say.

    Args:
        name: its line in the .fileids file.
        path: of the recording.
        labels: uint8[characters], the transcript.
        length: samples.
    """

    name: str
    path: Path
    labels: NDArray[np.uint8]
    length: int


def find_utterances(source: Path) -> dict[str, tuple[Utterance, ...]]:
    """Find all utterances of a directory by its lists, transcripts, and the recordings' headers and sizes.

    Args:
        source: a directory with etc/ and wav/, or with a folder an4 that has them.

    Returns:
        The utterances of "train" and of "test", as the lists have them.

    Raises:
        DataError: a file that is missing, truncated, empty or of another format; a list and transcripts that differ; a
            transcript that is empty or has another character.
    """
    root = source / "an4" if (source / "an4" / "etc").is_dir() else source
    if not (root / "etc").is_dir():
        raise DataError(
            f"{root / 'etc'}: no such directory; unpack the publisher's archive and name its folder"
        )
    utterances = {}
    lists: dict[str, Path] = {}  # recording -> where it is listed
    for split in COUNTS:
        transcripts = _transcripts(root / "etc" / f"an4_{split}.transcription")
        listed = root / "etc" / f"an4_{split}.fileids"
        names = [line.strip() for line in _lines(listed) if line.strip()]
        if not names:
            raise DataError(f"{listed}: 0 utterances are not at least 1")
        for name in names:
            if name in lists:
                raise DataError(f"{listed}: {name} is there more than once, first in {lists[name].name}")
            lists[name] = listed
        utterances[split] = tuple(_utterance(root, name, listed, transcripts) for name in names)
    return utterances


def read_utterances(utterances: Iterable[Utterance]) -> Iterator[NDArray[np.int16]]:
    """Read recordings, one in memory at a time.

    Args:
        utterances: as find_utterances returned them.

    Returns:
        An iterator over int16[length].

    Raises:
        DataError: a file shorter than it was.
    """
    for utterance in utterances:
        if utterance.path.suffix == ".wav":
            with _wave(utterance.path) as recording:
                content = recording.readframes(utterance.length)
        else:
            try:
                content = utterance.path.read_bytes()
            except OSError as error:
                raise DataError(f"{utterance.path}: {error.strerror}") from error
        if len(content) != 2 * utterance.length:
            raise DataError(
                f"{utterance.path}: {len(content)} bytes of samples were read, not {2 * utterance.length}: "
                "the file is truncated"
            )
        samples = np.frombuffer(content, "<i2")
        if utterance.path.suffix != ".wav":
            # the low bytes of a recording are noise: where they count 256-fold it is far louder
            orders = (samples, np.frombuffer(content, ">i2"))
            samples = min(orders, key=lambda each: np.abs(each.astype(np.float64)).mean())
        yield samples.astype(np.int16)


def _utterance(root: Path, name: str, listed: Path, transcripts: dict[str, str]) -> Utterance:
    """One line of a list, with what belongs to it."""
    path = root / "wav" / f"{name}.wav"
    transcript = transcripts.get(Path(name).name)
    if transcript is None:
        raise DataError(f"{listed}: {name} has no line in {listed.with_suffix('.transcription').name}")
    labels = encoded(transcript, f"{listed.with_suffix('.transcription')}, {name}")
    raw = path.with_suffix(".raw")
    if path.is_file():
        length = _wave_length(path)
    elif raw.is_file():
        path, size = raw, raw.stat().st_size
        if size % 2:
            raise DataError(f"{raw}: {size} bytes are not a multiple of 2, one sample: the file is truncated")
        length = size // 2
    else:
        raise DataError(f"{path}: no such file, nor {raw.name}")
    if length < 1:
        raise DataError(f"{path}: 0 samples are not at least 1")
    return Utterance(name, path, labels, length)


def _wave_length(path: Path) -> int:
    """Samples of a WAV file; DataError unless 16 kHz, 16 bits, one channel, and whole."""
    with _wave(path) as recording:
        for value, wanted, what in (
            (recording.getframerate(), RATE, "Hz"),
            (recording.getnchannels(), 1, "channels"),
            (8 * recording.getsampwidth(), 16, "bits per sample"),
        ):
            if value != wanted:
                raise DataError(f"{path}: {value} {what} are not {wanted}")
        length = recording.getnframes()
    if path.stat().st_size < 2 * length:
        raise DataError(
            f"{path}: {path.stat().st_size} bytes cannot hold the {length} samples that its header names: "
            "the file is truncated"
        )
    return length


def _wave(path: Path) -> wave.Wave_read:
    try:
        return wave.open(str(path), "rb")
    # RuntimeError: a chunk is longer than the file
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        why = str(error) or "it ends in its header"
        raise DataError(f"{path}: not a whole WAV file: {why}") from error


def _transcripts(path: Path) -> dict[str, str]:
    """Name -> transcript, of the lines of a .transcription file."""
    transcripts: dict[str, str] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        match = LINE.match(line)
        if match is None:
            raise DataError(f"{path}, line {number}: {line!r} is not a transcript and a name in parentheses")
        if match["name"] in transcripts:
            raise DataError(f"{path}, line {number}: {match['name']} is there more than once")
        transcripts[match["name"]] = match["text"]
    return transcripts


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
