"""Utterances with their transcripts, and their HDF5 layout: written atomically, read through a memory map.

/               attributes: format, version, name, source, alphabet
/train, /test   attribute: crc32, of all arrays' bytes in the order below
    samples        int16[total], contiguous, 16 kHz
    offsets        int64[N + 1]
    labels         uint8[total], contiguous
    label_offsets  int64[N + 1]
    names          str[N]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.prepared_file import SPLITS, Layout, Part

ALPHABET = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
"""Label -> character; label 0 is CTC's blank, which no transcript has."""
RATE = 16_000
LAYOUT = Layout(
    "speech",
    "oktopk-speech",
    1,
    {"samples": "<i2", "offsets": "<i8", "labels": "|u1", "label_offsets": "<i8"},
)


@dataclass(frozen=True)
class SpeechSet:
    """One split of a speech data set.

    Args:
        samples: int16[total], 16 kHz, one utterance after the other.
        offsets: int64[utterances + 1], where each begins in samples.
        labels: uint8[total], the transcripts one after the other, labels of ALPHABET.
        label_offsets: int64[utterances + 1], where each begins in labels.
        names: of the utterances.
        name: of the data set.
        source: where it comes from, in words.

    Raises:
        DataError: arrays that do not fit together, an utterance or a transcript of length zero, a label out of bounds.
    """

    samples: NDArray[np.int16]
    offsets: NDArray[np.int64]
    labels: NDArray[np.uint8]
    label_offsets: NDArray[np.int64]
    names: tuple[str, ...]
    name: str
    source: str

    def __post_init__(self) -> None:
        if not self.names:
            raise DataError("0 utterances are not at least 1")
        _check_offsets(self.offsets, len(self.samples), self.names, "samples")
        _check_offsets(self.label_offsets, len(self.labels), self.names, "labels")
        wrong = np.flatnonzero((self.labels < 1) | (self.labels >= len(ALPHABET)))
        if len(wrong):
            which = int(np.searchsorted(self.label_offsets, wrong[0], "right")) - 1
            raise DataError(
                f"utterance {self.names[which]}: label {self.labels[wrong[0]]} is not in [1, {len(ALPHABET)})"
            )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[utterances], samples of each."""
        return np.diff(self.offsets)

    @property
    def label_lengths(self) -> NDArray[np.int64]:
        """int64[utterances], labels of each."""
        return np.diff(self.label_offsets)

    def transcript(self, number: int) -> str:
        return decoded(self.labels[self.label_offsets[number] : self.label_offsets[number + 1]])


def encoded(transcript: str, where: str) -> NDArray[np.uint8]:
    """uint8[characters], in [1, len(ALPHABET)): a transcript as labels; runs of white space count as one space.

    Raises:
        DataError, which begins with `where`: it is empty, or has another character than letters, apostrophes and spaces.
    """
    text = " ".join(transcript.split())
    if not text:
        raise DataError(f"{where}: the transcript is empty")
    # one by one: in upper case some letters are two, which are none
    labels = [ALPHABET.find(upper, 1) if len(upper) == 1 else -1 for upper in map(str.upper, text)]
    if -1 in labels:
        raise DataError(
            f"{where}: {text[labels.index(-1)]!r} in the transcript {text!r} is not one of {ALPHABET[1:]!r}"
        )
    return np.array(labels, np.uint8)


def decoded(labels: NDArray[np.integer]) -> str:
    """Labels, none of them the blank, as text."""
    return "".join(ALPHABET[label] for label in labels)


def _check_offsets(offsets: NDArray[np.int64], total: int, names: tuple[str, ...], what: str) -> None:
    if offsets.shape != (len(names) + 1,):
        raise DataError(
            f"{len(offsets)} offsets of {what} are not {len(names) + 1}, one per utterance and the end"
        )
    if offsets[0] != 0 or offsets[-1] != total:
        raise DataError(f"offsets of {what} from {offsets[0]} to {offsets[-1]} are not from 0 to {total}")
    short = np.flatnonzero(np.diff(offsets) < 1)
    if len(short):
        length = offsets[short[0] + 1] - offsets[short[0]]
        raise DataError(f"utterance {names[short[0]]}: {length} {what} are not at least 1")


def write_speech_file(
    path: Path,
    *,
    name: str,
    source: str,
    names: Mapping[str, Sequence[str]],
    lengths: Mapping[str, Sequence[int]],
    labels: Mapping[str, Sequence[NDArray[np.uint8]]],
    samples: Callable[[str], Iterator[NDArray[np.int16]]],
) -> None:
    """Write a speech set beside its place and rename it there when it is whole.

    Args:
        path: of the file; its directory must exist. A file there is replaced.
        name: of the data set.
        source: where it comes from, in words.
        names, lengths, labels: of the utterances of "train" and of "test"; lengths in samples.
        samples: split -> the samples of its utterances, in that order, one in memory at a time.

    Raises:
        DataError: no such directory; a split without utterances; an utterance of another length than said. The place
            is then as it was.
    """
    offsets = {split: np.cumsum([0, *lengths[split]], dtype=np.int64) for split in SPLITS}
    label_offsets = {split: np.cumsum([0, *map(len, labels[split])], dtype=np.int64) for split in SPLITS}
    shapes = {
        split: {
            "samples": (int(offsets[split][-1]),),
            "offsets": (len(names[split]) + 1,),
            "labels": (int(label_offsets[split][-1]),),
            "label_offsets": (len(names[split]) + 1,),
        }
        for split in SPLITS
    }

    def parts() -> Iterator[Part]:
        for split in SPLITS:
            yield split, 0, {"offsets": offsets[split], "label_offsets": label_offsets[split]}
            yield split, 0, {"labels": np.concatenate(list(labels[split]))}
            for utterance, length, wave in zip(names[split], lengths[split], samples(split), strict=True):
                if len(wave) != length:
                    raise DataError(f"{path}: {len(wave)} samples of utterance {utterance} are not {length}")
                yield split, None, {"samples": wave}

    with LAYOUT.created(path, shapes, name=name, source=source, alphabet=ALPHABET) as file:
        LAYOUT.fill(file, parts())
        for split in SPLITS:
            file[split].create_dataset("names", data=list(names[split]), dtype=h5py.string_dtype())


def open_speech_file(path: str | Path) -> tuple[SpeechSet, SpeechSet]:
    """Open a speech set that data.prepare wrote; result and errors as data.images.file.open_image_file's."""

    def build(group: h5py.Group, columns: dict[str, Any]) -> SpeechSet:
        if (alphabet := group.file.attrs.get("alphabet")) != ALPHABET:
            raise DataError(
                f"alphabet {alphabet!r} is not {ALPHABET!r}: write it with python -m data.prepare"
            )
        return SpeechSet(**columns, names=tuple(group["names"].asstr()[:]))

    return LAYOUT.read(Path(path), build)
