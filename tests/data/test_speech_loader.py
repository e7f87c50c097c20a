"""Spectrograms and batches of speech: alike on any number of ranks, alone and in company."""

from __future__ import annotations

import numpy as np
import torch

from data.speech.loader import BINS, HOP, WINDOW, LengthBuckets, change_tempo, log_spectrograms
from tests.data.test_loaders import utterances
from tests.utterances import spoken


def test_a_spectrogram_is_that_of_its_definition() -> None:
    samples = torch.from_numpy(spoken("AB"))
    found, frames = log_spectrograms(samples[None], torch.tensor([len(samples)]))
    assert (found.shape, frames.tolist()) == ((1, BINS, 21), [21])
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    padded = np.pad(samples.numpy().astype(np.float64), WINDOW // 2)
    pieces = [padded[start : start + WINDOW] * window for start in range(0, len(samples) + 1, HOP)]
    logs = np.log1p(np.abs(np.fft.rfft(pieces, axis=1))).T
    # single precision: a faint bin beside a loud one is off by what a machine's Fourier transform rounds
    assert np.allclose(found[0].numpy(), (logs - logs.mean()) / logs.std(), atol=1e-3)


def test_a_spectrogram_is_the_same_alone_and_in_company() -> None:
    texts = ["A", "HELLO", "ON"]
    waves = [torch.from_numpy(spoken(text)) for text in texts]
    lengths = torch.tensor([len(wave) - number for number, wave in enumerate(waves)])
    waves = [wave[:length] for wave, length in zip(waves, lengths.tolist(), strict=True)]
    together, frames = log_spectrograms(torch.nn.utils.rnn.pad_sequence(waves, batch_first=True), lengths)
    for row, wave in enumerate(waves):
        alone, _ = log_spectrograms(wave[None], lengths[row : row + 1])
        assert torch.allclose(together[row, :, : frames[row]], alone[0], atol=1e-5)
        assert not together[row, :, frames[row] :].any()
    assert torch.equal(frames, lengths // HOP + 1)


def test_silence_and_a_single_sample_have_finite_spectrograms() -> None:
    found, frames = log_spectrograms(torch.zeros(2, 400, dtype=torch.int16), torch.tensor([400, 1]))
    assert torch.isfinite(found).all()
    assert frames.tolist() == [3, 1]


def test_tempo_stretches_a_recording_and_nothing_else() -> None:
    ramp = torch.arange(40.0).repeat(200, 3, 1)
    frames = torch.tensor([40] * 100 + [5] * 100)
    ramp[100:, :, 5:] = 0
    draws = np.random.default_rng(0).integers(0, 2**64, 200, np.uint64)
    changed, counts = change_tempo(ramp, frames, draws, tempo=(0.8, 1.25))
    assert (min(counts[:100]), max(counts[:100])) == (32, 49)
    assert set(counts[100:].tolist()) == {4, 5, 6}
    assert changed.shape == (200, 3, 49)
    for row, count in enumerate(counts.tolist()):
        assert not changed[row, :, count:].any()
        inner = changed[row, 0, 1 : count - 1].diff()  # a ramp stays one, at its ends a frame may repeat
        assert torch.allclose(inner, torch.tensor(int(frames[row]) / count), atol=1e-4)
    same, untouched = change_tempo(ramp, frames, draws, tempo=(1.0, 1.0))
    assert torch.equal(same, ramp) and torch.equal(untouched, frames)


def test_steps_have_like_lengths_and_epochs_other_company() -> None:
    lengths = np.random.default_rng(0).integers(10_000, 100_000, 948)
    buckets = LengthBuckets(lengths, batch_size=2, rank=0, size=4, seed=0)

    def waste(epoch: int) -> float:
        order = lengths[buckets.order(epoch)[: buckets.steps_per_epoch * 8]].reshape(-1, 8)
        return float(1 - order.mean() / order.max(axis=1).mean())

    assert max(waste(epoch) for epoch in range(3)) < 0.12
    company = [{frozenset(step) for step in buckets.order(e)[:944].reshape(-1, 8).tolist()} for e in range(2)]
    assert len(company[0] & company[1]) < 5
    first = [lengths[buckets.order(e)[:8]].mean() for e in range(20)]
    assert np.std(first) > 10_000


def test_a_batch_holds_its_utterances_and_their_transcripts() -> None:
    source = utterances()
    speech = source.speech
    (batch, *_) = source.training(batch_size=5, rank=0, size=1, seed=0).epoch(0)
    start = 0
    for row, index in enumerate(batch.indices.tolist()):
        length, labels = int(batch.lengths[row]), int(batch.target_lengths[row])
        wave = speech.samples[speech.offsets[index] : speech.offsets[index + 1]]
        assert np.array_equal(batch.samples[row, :length].numpy(), wave)
        assert not batch.samples[row, length:].any()
        said = speech.labels[speech.label_offsets[index] : speech.label_offsets[index + 1]]
        assert batch.targets[start : start + labels].tolist() == said.tolist()
        start += labels
    assert start == len(batch.targets)
