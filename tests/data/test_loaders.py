"""Batches of every kind of data: the same for the same (seed, epoch, step), whatever the ranks, blocks and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from data import DataError
from data.batches import Source
from data.images.file import ImageSet, channel_statistics
from data.images.loader import Augment, Pixels
from data.speech.loader import SpeechBatch, Utterances
from data.text.file import SPECIAL, TextSet
from data.text.loader import MaskedText, NextTokens
from data.text.packing import Frame, Packer
from tests.utterances import speech_set

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    ),
]
COUNT = 64
WORDS = (*SPECIAL, *(f"word{number}" for number in range(45)))


def image_set(count: int = COUNT, seed: int = 0, size: int = 8) -> ImageSet:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    mean, std = channel_statistics(images)
    labels = np.arange(count, dtype=np.int64) % 4
    return ImageSet(images, labels, mean, std, ("a", "b", "c", "d"))


def text_set(count: int = 40, length: int = 32) -> TextSet:
    drawn = np.random.default_rng(3)
    documents = [
        [list(map(int, drawn.integers(5, 50, drawn.integers(1, 9)))) for _ in range(drawn.integers(1, 12))]
        for _ in range(count)
    ]
    packed = Packer(Frame(length, 0, 2, 3), "s").pack(documents)
    return TextSet(packed, WORDS, "made.h5")


def utterances() -> Utterances:
    random = np.random.default_rng(1)
    texts = ["AB C"[: 1 + random.integers(4)] * (1 + random.integers(3)) + "D" for _ in range(COUNT)]
    return Utterances(speech_set(texts))


KINDS: dict[str, Callable[[], Source[Any]]] = {
    "images": lambda: Pixels(image_set(), Augment(crop=2, flip=True)),
    "speech": utterances,
    "next tokens": lambda: NextTokens(text_set()),
    "masked words": lambda: MaskedText(text_set()),
}


def samples(batches: Iterable[Any]) -> list[bytes]:
    """The bytes of each sample of some batches, in order."""
    found: list[bytes] = []
    for batch in batches:
        if isinstance(batch, SpeechBatch):
            waves = zip(batch.samples, batch.lengths.tolist(), strict=True)
            targets = batch.targets.split(batch.target_lengths.tolist())
            draws = batch.draws if batch.draws is not None else np.zeros(len(batch.indices), np.uint64)
            for (wave, length), target, draw in zip(waves, targets, draws, strict=True):
                spoken = wave[:length].cpu().numpy().tobytes()
                found.append(spoken + target.cpu().numpy().tobytes() + draw.tobytes())
            continue
        columns = [tensor.cpu() for tensor in batch]
        assert len({len(column) for column in columns}) == 1
        found += [b"".join(one.numpy().tobytes() for one in row) for row in zip(*columns, strict=True)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_a_function_of_seed_epoch_and_step(kind: str) -> None:
    place = {"batch_size": 3, "rank": 1, "size": 2}
    first, again = (KINDS[kind]().training(**place, seed=3) for _ in range(2))
    wanted = {
        (epoch, step): samples([next(first.epoch(epoch, step))]) for epoch in range(2) for step in range(5)
    }
    for (epoch, step), found in reversed(wanted.items()):
        assert samples([next(again.epoch(epoch, step))]) == found
    rest = samples(KINDS[kind]().training(**place, seed=3).epoch(1, 3))
    assert rest[: len(wanted[1, 3])] == wanted[1, 3]
    assert samples(first.epoch(1))[-len(rest) :] == rest
    other_seed = KINDS[kind]().training(**place, seed=4)
    other_rank = KINDS[kind]().training(**place | {"rank": 0}, seed=3)
    others = [samples([next(loader.epoch(0))]) for loader in (other_seed, other_rank)]
    assert len(set(map(tuple, [*wanted.values(), *others]))) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_has_the_same_samples(kind: str) -> None:
    def together(size: int, step: int) -> list[bytes]:
        loaders = [
            source.training(batch_size=12 // size, rank=rank, size=size, seed=3) for rank in range(size)
        ]
        assert len({loader.steps_per_epoch for loader in loaders}) == 1
        return samples(next(loader.epoch(2, step)) for loader in loaders)

    source = KINDS[kind]()
    for step in (2, 0):
        assert together(1, step) == together(3, step) == together(4, step)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "speech"])
def test_blocks_of_batches_change_nothing(kind: str, device: torch.device) -> None:
    alone, blocks = (KINDS[kind]().training(batch_size=5, rank=1, size=2, seed=1) for _ in range(2))
    alone.source.block = 1
    blocks.source.to(device)
    blocks.source.block = 12
    last = alone.steps_per_epoch - 1
    for epoch, step in ((0, 0), (0, 3), (0, 2), (1, 2), (0, 2), (1, last)):
        assert samples(blocks.epoch(epoch, step)) == samples(alone.epoch(epoch, step))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_samples_are_seen_once_over_all_ranks_alike(kind: str, device: torch.device) -> None:
    def held_out(size: int, most: int = 0) -> list[bytes]:
        places = [{"batch_size": 3 + size, "rank": rank, "size": size} for rank in range(size)]
        loaders = [source.held_out(most=most, **place) for place in places]
        return sorted(samples(batch for loader in loaders for batch in loader))

    source = KINDS[kind]()
    source.to(device)
    count = len(source)
    whole = held_out(1)
    assert len(whole) == count
    for size in (3, count + 2):
        assert held_out(size) == whole
    some = held_out(1, most=count // 2)
    assert some == held_out(4, most=count // 2)
    assert len(some) == count // 2
    assert set(some) < set(whole) and held_out(2, most=10**6) == whole


def test_fewer_samples_than_ranks_are_refused_with_the_file() -> None:
    texts = text_set(count=3)
    with pytest.raises(DataError, match=rf"made\.h5: {len(texts)} samples are fewer than 100 ranks"):
        MaskedText(texts).training(batch_size=1, rank=0, size=100, seed=0)


def test_samples_that_do_not_fit_are_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **keys: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    loader = KINDS["images"]().training(batch_size=5, rank=0, size=1, seed=0)
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(DataError, match="64 images of 0.0 GB do not fit on cpu: no room"):
        loader.source.to(CPU)
