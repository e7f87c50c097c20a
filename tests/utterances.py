"""Synthetic speech: each character is a tone of its own, in the layout that AN4 is published in."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.speech.file import ALPHABET, RATE, SpeechSet, encoded

TONE = 1600


def spoken(text: str, seed: int = 0) -> NDArray[np.int16]:
    """int16: 100 ms of a tone per character, with noise."""
    time = np.arange(TONE) / RATE
    tones = [3000 * np.sin(2 * np.pi * (200 + 120 * ALPHABET.index(character)) * time) for character in text]
    signal = np.concatenate(tones)
    return (signal + 100 * np.random.default_rng(seed).standard_normal(len(signal))).astype(np.int16)


def write_wave(path: Path, samples: NDArray[np.int16], rate: int = RATE, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def write_an4(
    root: Path, train: Sequence[str], test: Sequence[str], *, raw: str | None = None
) -> dict[str, list[Path]]:
    """A directory as published, of WAV files or (raw: a dtype) of headerless ones; the paths of the recordings."""
    (root / "etc").mkdir(parents=True)
    written: dict[str, list[Path]] = {}
    for split, texts in (("train", train), ("test", test)):
        names = [f"an4_{split}/s{number % 2}/u{number}-{split}" for number in range(len(texts))]
        # the published test transcripts have no <s>
        left, right = ("<s> ", " </s>") if split == "train" else ("", "")
        lines = [
            f"{left}{text}{right} ({Path(name).name})\n" for text, name in zip(texts, names, strict=True)
        ]
        (root / "etc" / f"an4_{split}.fileids").write_text("".join(f"{name}\n" for name in names))
        (root / "etc" / f"an4_{split}.transcription").write_text("".join(lines))
        written[split] = []
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            path = root / "wav" / f"{name}.{'raw' if raw else 'wav'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if raw:
                path.write_bytes(spoken(text, number).astype(raw).tobytes())
            else:
                write_wave(path, spoken(text, number))
            written[split].append(path)
    return written


def speech_set(texts: Sequence[str]) -> SpeechSet:
    """The texts, spoken."""
    waves = [spoken(text, number) for number, text in enumerate(texts)]
    labels = [encoded(text, text) for text in texts]
    return SpeechSet(
        samples=np.concatenate(waves),
        offsets=np.cumsum([0, *map(len, waves)]),
        labels=np.concatenate(labels),
        label_offsets=np.cumsum([0, *map(len, labels)]),
        names=tuple(f"u{number}" for number in range(len(texts))),
        name="tones",
        source="synthetic",
    )
