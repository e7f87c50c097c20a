"""Speech as it is trained on: synthetic utterances made here, the tiny network, and what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

from data import DataError
from data.prepare import prepare_an4
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.tasks.speech import build_speech, check_lengths, spectrograms_of
from tests.devices import gpus
from tests.jobs.train.conftest import SPOKEN, Configured, Words
from tests.utterances import speech_set, write_an4


def test_training_on_a_few_utterances_lowers_the_loss(tmp_path: Path, words: Words) -> None:
    given = words("lstm", "training.steps=30", "training.eval_every=30", "training.batch_size=6")
    given += ["optimizer.lr=0.01", "optimizer.clip_norm=20", "reduction.dense_warmup_steps=10"]
    assert main([*given, f"run.file={tmp_path / 'run.h5'}"], comm=MPI.COMM_SELF) == 0
    (run,) = read_runs([tmp_path / "run.h5"])
    assert run.status == "complete"
    assert run.steps["loss"][-5:].mean() < 0.7 * run.steps["loss"][:3].mean()
    assert run.evaluations["samples"].tolist() == [9]
    assert np.isfinite(run.evaluations["loss"]).all()
    assert run.evaluations["accuracy"][-1] <= 1.0


@pytest.mark.long("trains until words are read; in `make test` the loss falls")
def test_the_network_learns_to_read_what_it_has_not_heard(tmp_path: Path, words: Words) -> None:
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(SPOKEN, 1 + number % 2)) for number in range(124)]
    write_an4(tmp_path / "an4", texts[:100], texts[100:])
    prepare_an4(tmp_path, tmp_path / "an4.h5", partial=True)
    given = words("lstm", f"data.path={tmp_path / 'an4.h5'}", f"run.file={tmp_path / 'run.h5'}")
    given += ["model.width=0.125", "training.steps=120", "training.eval_every=120", "training.batch_size=8"]
    given += ["optimizer.name=adam", "optimizer.momentum=0", "optimizer.lr=3e-3", "schedule.name=constant"]
    assert main([*given, "reduction.method=dense"], comm=MPI.COMM_SELF) == 0
    (run,) = read_runs([tmp_path / "run.h5"])
    assert run.evaluations["samples"].tolist() == [36]
    assert run.evaluations["accuracy"][-1] > 0.6
    assert 0.0 <= run.evaluations["character_error_rate"][-1] < 0.4


def test_tempo_changes_training_and_not_evaluation(configured: Configured) -> None:
    plain, slower = (
        build_speech(configured("lstm", *extra), rank=0, size=1) for extra in ([], ["data.tempo=[0.5,0.9]"])
    )
    left, right = (next(iter(workload.batches(0))) for workload in (plain, slower))
    assert torch.equal(left.samples, right.samples)
    assert plain.loss(left).item() != slower.loss(right).item()
    fresh = [
        build_speech(configured("lstm", *extra), rank=0, size=1).score()
        for extra in ([], ["data.tempo=[0.5,0.9]"])
    ]
    assert fresh[0] == fresh[1]


def test_an_utterance_too_short_for_its_transcript_is_named() -> None:
    speech = speech_set(["ABC", "AA BB"])
    check_lengths(speech, "here")
    # 5 labels and two blanks need 7 output frames: from 13 frames, from 12 hops
    offsets = speech.offsets.copy()
    offsets[2] = offsets[1] + 12 * 160
    whole = dict(vars(speech), offsets=offsets, samples=speech.samples[: offsets[2]])
    check_lengths(type(speech)(**whole), "here")
    with pytest.raises(DataError, match=r"6 frames of the network at a tempo of 1\.1 are fewer than the 7"):
        check_lengths(type(speech)(**whole), "here", 1.1)
    offsets[2] -= 1
    shorter = dict(whole, samples=speech.samples[: offsets[2]])
    with pytest.raises(DataError, match=r"here, utterance u1: 6 frames .* fewer than the 7 .* for 'AA BB'"):
        check_lengths(type(speech)(**shorter), "here")


def test_an_utterance_of_a_single_frame_is_named() -> None:
    speech = speech_set(["A", "B"])
    offsets = np.array([0, 300, 300 + speech.lengths[1]])
    short = dict(vars(speech), offsets=offsets, samples=speech.samples[: offsets[-1]])
    check_lengths(type(speech)(**short), "here")
    with pytest.raises(
        DataError, match=r"utterance u0: 1 frames .* fewer than the 2 that batch normalization"
    ):
        check_lengths(type(speech)(**short), "here", least=2)


def test_a_file_that_cannot_be_trained_on_ends_the_run(
    tmp_path: Path, prepared: Path, words: Words, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.h5"
    path.write_bytes(prepared.read_bytes())
    with h5py.File(path, "r+") as file:
        file["train/offsets"][1] = file["train/offsets"][2] - 200
    assert main(words("lstm", f"data.path={path}", "training.steps=9"), comm=MPI.COMM_SELF) == 2
    message = r"split 'train', utterance an4_train/s1/u1-train: \d frames of the network are fewer than .*"
    assert re.fullmatch(rf"jobs\.train: {path}, {message}\n", capsys.readouterr().err)


@pytest.mark.skipif(not gpus(), reason="no GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_computes_the_losses_and_gradients_of_the_host(
    configured: Configured, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by default cuDNN rounds to TF32, which moves the gradients' norm by 0.1 to 0.3 %
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    class Placed:
        def __init__(self, name: str) -> None:
            self.device = torch.device(name)

    found = []
    for name, kind in (("cpu", "float32"), ("cuda", precision)):
        workload = build_speech(
            configured("lstm", f"training.precision={kind}", "data.tempo=[0.9,1.1]"), rank=0, size=1
        )
        workload.move_to(Placed(name))
        losses = []
        for batch in itertools.islice(workload.batches(0), 3):
            loss = workload.loss(batch)
            loss.backward()
            losses.append(loss.item())
        norm = float(torch.cat([p.grad.reshape(-1) for p in workload.model.parameters()]).norm())
        found.append([*losses, norm])
        score = workload.score()
        assert (score.samples, np.isfinite(score.loss)) == (9, True)
    assert found[1] == pytest.approx(found[0], rel=1e-3 if precision == "float32" else 0.1)
    batch, slower = next(iter(workload.batches(0))), (0.9, 1.1)
    once, again = (spectrograms_of(batch, slower)[0] for _ in range(2))
    assert once.is_cuda and torch.isfinite(once).all() and torch.equal(once, again)
    assert not torch.equal(once, spectrograms_of(batch, ())[0])
