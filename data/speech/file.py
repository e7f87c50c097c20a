"""HDF5 layout of speech sets: written atomically, read through a memory map.

/               attributes: format, version, name, source, alphabet
/train, /test   attribute: crc32, of all arrays' bytes in the order below
    samples        int16[total], contiguous, 16 kHz
    offsets        int64[N + 1]
    labels         uint8[total], contiguous
    label_offsets  int64[N + 1]
    names          str[N]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.prepared_file import SPLITS, Layout, mapped
from data.speech.dataset import ALPHABET, SpeechSet

LAYOUT = Layout(
    "speech",
    "oktopk-speech",
    1,
    {"samples": "<i2", "offsets": "<i8", "labels": "|u1", "label_offsets": "<i8"},
)


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
    counts = {split: len(names[split]) for split in SPLITS}
    with LAYOUT.created(path, counts, name=name, source=source, alphabet=ALPHABET) as file:
        for split in SPLITS:
            group, own = file.create_group(split), labels[split]
            offsets = np.concatenate([[0], np.cumsum(lengths[split], dtype=np.int64)])
            written = group.create_dataset("samples", (int(offsets[-1]),), LAYOUT.columns["samples"])
            places = zip(names[split], offsets[:-1], offsets[1:], samples(split), strict=True)
            for utterance, start, stop, wave in places:
                if len(wave) != stop - start:
                    raise DataError(
                        f"{path}: {len(wave)} samples of utterance {utterance} are not {stop - start}"
                    )
                written[start:stop] = wave
            group["offsets"], group["labels"] = offsets, np.concatenate(list(own))
            group["label_offsets"] = np.cumsum([0, *map(len, own)], dtype=np.int64)
            group.create_dataset("names", data=list(names[split]), dtype=h5py.string_dtype())


def open_speech_file(path: str | Path, *, verify: bool = False) -> tuple[SpeechSet, SpeechSet]:
    """Open a speech set that data.prepare wrote; arguments, result and errors as data.images.file.open_image_file's."""
    path = Path(path)

    def read(group: h5py.Group) -> SpeechSet:
        return SpeechSet(
            samples=mapped(group["samples"], "c").astype(np.int16, casting="safe", copy=False),
            offsets=group["offsets"][:].astype(np.int64, casting="safe"),
            labels=group["labels"][:].astype(np.uint8, casting="safe"),
            label_offsets=group["label_offsets"][:].astype(np.int64, casting="safe"),
            names=tuple(group["names"].asstr()[:]),
            name=str(group.file.attrs["name"]),
            source=str(group.file.attrs["source"]),
        )

    with LAYOUT.opened(path) as file:
        if (alphabet := file.attrs.get("alphabet")) != ALPHABET:
            raise DataError(
                f"{path}: alphabet {alphabet!r} is not {ALPHABET!r}; write the file with python -m data.prepare"
            )
        return LAYOUT.read(file, path, read, verify=verify)
