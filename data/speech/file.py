"""The one HDF5 layout of speech sets: written whole or not at all, mapped into memory by its readers.

/               attributes: format, version, name, source, alphabet
/train, /test   attribute: crc32, of all arrays' bytes in the order below
    samples        int16[total], contiguous, 16 kHz
    offsets        int64[N + 1]
    labels         uint8[total], contiguous
    label_offsets  int64[N + 1]
    names          str[N]
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.prepared_file import SPLITS, check_sum, created, mapped, opened
from data.speech.dataset import ALPHABET, SpeechSet

FORMAT, VERSION = "oktopk-speech", 1
BLOCK = 1 << 22
ARRAYS = {"samples": "<i2", "offsets": "<i8", "labels": "|u1", "label_offsets": "<i8"}


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
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such directory")
    for split in SPLITS:
        if not names[split]:
            raise DataError(f"{path}: 0 utterances in split {split!r}, not at least 1")
    with created(path, format=FORMAT, version=VERSION, name=name, source=source, alphabet=ALPHABET) as file:
        for split in SPLITS:
            group = file.create_group(split)
            _write_split(group, path, names[split], lengths[split], labels[split], samples(split))


def open_speech_file(path: str | Path, *, verify: bool = False) -> tuple[SpeechSet, SpeechSet]:
    """Open a speech set that data.prepare wrote.

    The samples are mapped, not read: the ranks of one host share one copy, in the page cache.

    Args:
        path: of the HDF5 file.
        verify: read everything and compare checksums; else only what is small is checked.

    Returns:
        The training and the test split.

    Raises:
        DataError: no such file, truncated, not HDF5, of another layout, contents that do not fit it, or (with
            verify) changed bytes.
    """
    path = Path(path)
    with opened(path, "speech", FORMAT, VERSION) as file:
        if (alphabet := file.attrs.get("alphabet")) != ALPHABET:
            raise DataError(
                f"{path}: alphabet {alphabet!r} is not {ALPHABET!r}; write the file with python -m data.prepare"
            )
        train, test = (_read_split(file, path, split, verify) for split in SPLITS)
    return train, test


def _write_split(
    group: h5py.Group,
    path: Path,
    names: Sequence[str],
    lengths: Sequence[int],
    labels: Sequence[NDArray[np.uint8]],
    samples: Iterator[NDArray[np.int16]],
) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    label_offsets = np.concatenate([[0], np.cumsum([len(each) for each in labels], dtype=np.int64)])
    written = group.create_dataset("samples", (int(offsets[-1]),), ARRAYS["samples"])
    for name, start, stop, utterance in zip(names, offsets[:-1], offsets[1:], samples, strict=True):
        if len(utterance) != stop - start:
            raise DataError(f"{path}: {len(utterance)} samples of utterance {name} are not {stop - start}")
        written[start:stop] = utterance
    group["offsets"], group["label_offsets"] = offsets, label_offsets
    group["labels"] = np.concatenate(list(labels))
    group.create_dataset("names", data=list(names), dtype=h5py.string_dtype())
    group.attrs["crc32"] = _checksum(group)


def _read_split(file: h5py.File, path: Path, split: str, verify: bool) -> SpeechSet:
    group = file[split]
    if verify:
        check_sum(group, _checksum(group))
    try:
        return SpeechSet(
            samples=mapped(group["samples"]).astype(np.int16, casting="safe", copy=False),
            offsets=group["offsets"][:].astype(np.int64, casting="safe"),
            labels=group["labels"][:].astype(np.uint8, casting="safe"),
            label_offsets=group["label_offsets"][:].astype(np.int64, casting="safe"),
            names=tuple(group["names"].asstr()[:]),
            name=str(file.attrs["name"]),
            source=str(file.attrs["source"]),
        )
    except DataError as error:
        raise DataError(f"{path}, split {split!r}: {error}") from error


def _checksum(group: h5py.Group) -> int:
    checksum = 0
    for name, kind in ARRAYS.items():
        for start in range(0, len(group[name]), BLOCK):
            checksum = zlib.crc32(group[name][start : start + BLOCK].astype(kind), checksum)
    return checksum
