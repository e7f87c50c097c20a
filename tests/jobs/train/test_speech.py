"""Speech as it is trained on: synthetic utterances made here, the tiny network, and what is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

from data import DataError
from data.prepare import prepare_an4
from data.speech.an4 import open_an4
from data.speech.loader import SpeechBatch
from data.speech.spectrogram import log_spectrograms
from jobs.config.config import Config
from jobs.config.file import ConfigError, load
from jobs.report.summary import read_runs
from jobs.run.reader import RunReader
from jobs.train.__main__ import main
from jobs.train.optimizers import learning_rate_factor
from jobs.train.setup import Build, build_workload
from jobs.train.tasks.speech import build_speech, check_lengths, spectrograms_of
from jobs.train.tasks.task import Score, Workload, WorkloadError
from tests.devices import gpus
from tests.utterances import speech_set, write_an4

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "jobs" / "configs" / "lstm.toml"
TINY = ["model.width=0.0625", "training.device=cpu"]
WORDS = ("NO", "GO", "UP", "ON", "A")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 1 + number % 2)) for number in range(24)]
    write_an4(folder / "an4", texts[:18], texts[18:])
    prepare_an4(folder, folder / "an4.h5", partial=True)
    return folder / "an4.h5"


def config(path: Path, *overrides: str) -> Config:
    return load(CONFIG, [f"data.path={path}", *TINY, *overrides])


def train_alone(path: Path, data: Path, *overrides: str, build: Build = build_workload) -> int:
    settings = [*TINY, f"data.path={data}", f"run.file={path}", *overrides]
    return main([str(CONFIG), "--set", *settings], comm=MPI.COMM_SELF, build=build)


def test_the_shipped_schedule_falls_a_little_every_epoch() -> None:
    shipped = load(CONFIG, ["data.path=an4.h5"])
    rates = [
        learning_rate_factor(shipped.schedule, step, steps=300, steps_per_epoch=100, ranks=4)
        for step in (0, 99, 100, 299)
    ]
    assert rates == pytest.approx([1, 1, 1 / 1.01, 1 / 1.01**2])


def test_training_on_a_few_synthetic_utterances_lowers_the_loss(tmp_path: Path, prepared: Path) -> None:
    overrides = [
        "training.steps=60",
        "training.eval_every=60",
        "training.batch_size=6",
        "optimizer.lr=0.01",
        "optimizer.clip_norm=20",
        "reduction.dense_warmup_steps=10",
    ]
    assert train_alone(tmp_path / "run.h5", prepared, *overrides) == 0
    (run,) = read_runs([tmp_path / "run.h5"])
    assert run.status == "complete"
    assert run.steps["loss"][-10:].mean() < 0.6 * run.steps["loss"][:3].mean()
    assert run.evaluations["samples"].tolist() == [9]
    assert np.isfinite(run.evaluations["loss"]).all()
    assert run.evaluations["accuracy"][-1] <= 1.0


@pytest.mark.long("trains until words are read; in `make test` the loss falls")
def test_the_network_learns_to_read_utterances_that_it_has_not_heard(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 1 + number % 2)) for number in range(124)]
    write_an4(tmp_path / "an4", texts[:100], texts[100:])
    prepare_an4(tmp_path, tmp_path / "an4.h5", partial=True)
    overrides = [
        "model.width=0.125",
        "training.steps=120",
        "training.eval_every=120",
        "training.batch_size=8",
        "optimizer.name=adam",
        "optimizer.momentum=0",
        "optimizer.lr=3e-3",
        "schedule.name=constant",
        "reduction.method=dense",
    ]
    assert train_alone(tmp_path / "run.h5", tmp_path / "an4.h5", *overrides) == 0
    (run,) = read_runs([tmp_path / "run.h5"])
    assert run.evaluations["samples"].tolist() == [36]
    assert run.evaluations["accuracy"][-1] > 0.6
    assert 0.0 <= run.evaluations["character_error_rate"][-1] < 0.4


def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, prepared: Path
) -> None:
    overrides = [
        "training.steps=6",
        "training.batch_size=4",
        "checkpoint.every_steps=3",
        "data.tempo=[0.9,1.1]",
    ]

    def build_failing(config: Config, *, rank: int, size: int) -> Workload:
        workload, taken = build_speech(config, rank=rank, size=size), itertools.count(1)
        loss = workload.loss

        def failing(batch: SpeechBatch) -> torch.Tensor:
            return loss(batch) * (float("nan") if next(taken) == 5 else 1.0)

        workload.loss = failing  # type: ignore[method-assign]
        return workload

    assert train_alone(tmp_path / "parts.h5", prepared, *overrides, build=build_failing) != 0
    for name in ("parts", "whole"):
        assert train_alone(tmp_path / f"{name}.h5", prepared, *overrides) == 0
    whole, parts = read_runs([tmp_path / "whole.h5", tmp_path / "parts.h5"])
    assert (whole.count, parts.count) == (6, 6)
    with RunReader(tmp_path / "parts.h5") as reader:
        assert reader.segments()["step"].tolist() == [0, 3]
    assert np.array_equal(whole.steps["loss"], parts.steps["loss"])


def test_scores_of_the_ranks_add_up_to_that_of_one(prepared: Path) -> None:
    chosen = config(prepared, "training.eval_batch_size=2")
    alone = build_speech(chosen, rank=0, size=1).score()
    parts = [build_speech(chosen, rank=rank, size=3).score() for rank in range(3)]
    assert alone == Score(
        pytest.approx(sum(part.loss for part in parts), rel=1e-5),
        sum(part.correct for part in parts),
        sum(part.samples for part in parts),
        sum(part.character_errors for part in parts),
        sum(part.characters for part in parts),
    )
    held_out = open_an4(prepared)[1]
    assert (alone.samples, alone.characters) == (9, len(held_out.labels))


def test_all_ranks_begin_with_the_same_weights_and_other_utterances(prepared: Path) -> None:
    ranks = [build_workload(config(prepared), rank=rank, size=2) for rank in range(2)]
    for left, right in zip(*(rank.model.parameters() for rank in ranks), strict=True):
        assert torch.equal(left, right)
    taken = [{int(i) for batch in rank.batches(0) for i in batch.indices} for rank in ranks]
    assert taken[0] and not taken[0] & taken[1]


def test_tempo_changes_training_and_not_evaluation(prepared: Path) -> None:
    plain, slower = (
        build_speech(config(prepared, *extra), rank=0, size=1) for extra in ([], ["data.tempo=[0.5,0.9]"])
    )
    left, right = (next(iter(workload.batches(0))) for workload in (plain, slower))
    assert torch.equal(left.samples, right.samples)
    assert plain.loss(left).item() != slower.loss(right).item()
    fresh = [
        build_speech(config(prepared, *extra), rank=0, size=1).score()
        for extra in ([], ["data.tempo=[0.5,0.9]"])
    ]
    assert fresh[0] == fresh[1]


def test_what_changes_utterances_is_off_by_default(prepared: Path) -> None:
    batch = next(build_speech(config(prepared), rank=0, size=1).batches(0))
    found, frames = spectrograms_of(batch, ())
    plain, plain_frames = log_spectrograms(batch.samples, batch.lengths)
    assert torch.equal(found, plain) and torch.equal(frames, plain_frames)


def test_an_utterance_changes_by_seed_and_epoch_and_alike_on_any_number_of_ranks(prepared: Path) -> None:
    def heard(epoch: int, size: int, batch_size: int, *more: str) -> dict[int, torch.Tensor]:
        chosen = config(prepared, f"training.batch_size={batch_size}", "data.tempo=[0.9,1.1]", *more)
        found = {}
        for rank in range(size):
            for batch in build_speech(chosen, rank=rank, size=size).batches(epoch):
                spectrograms, frames = spectrograms_of(batch, chosen.data.tempo)
                for row, index in enumerate(batch.indices.tolist()):
                    found[index] = spectrograms[row, :, : frames[row]]
        return found

    def alike(left: dict[int, torch.Tensor], right: dict[int, torch.Tensor]) -> int:
        pairs = [(left[index], right[index]) for index in left.keys() & right.keys()]
        assert len(pairs) >= 12
        return sum(a.shape == b.shape and torch.allclose(a, b, atol=1e-3) for a, b in pairs)

    alone = heard(1, 1, 6)
    assert alike(alone, heard(1, 3, 2)) == 18
    assert alike(alone, heard(1, 2, 1)) == 18
    for other in (heard(2, 1, 6), heard(1, 1, 6, "training.seed=1")):
        assert alike(alone, other) < 12  # short ones have few tempos


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.channels_last=true"], "training.channels_last True is not for model.name 'lstm'"),
        (["model.width=0.001"], "model: width 0.001 leaves no channel"),
        (["model.name=vgg16"], "data.name 'an4' takes model.name 'lstm'"),
        (["data.name=digits", "data.path="], "model.name 'lstm' takes data.name 'an4', not 'digits'"),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    prepared: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        build_workload(config(prepared, *overrides), rank=0, size=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.tempo=[1.5,1.1]"], "[1.5, 1.1] is not [least, most] within [0.5, 2]"),
        (["data.tempo=[0.1,1]"], "[0.1, 1.0] is not [least, most] within [0.5, 2]"),
        (["data.tempo=[1.1]"], "[1.1] is not [least, most]"),
    ],
)
def test_settings_of_other_data_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(Path("an4.h5"), *overrides)


def test_a_file_that_is_missing_or_too_small_for_the_ranks_is_named(tmp_path: Path, prepared: Path) -> None:
    with pytest.raises(DataError, match="none.h5: no such file"):
        build_workload(config(tmp_path / "none.h5"), rank=0, size=1)
    with pytest.raises(DataError, match="18 samples are fewer than the 20 of one step"):
        build_workload(config(prepared), rank=0, size=10)


def damaged(prepared: Path, folder: Path, name: str, dataset: str, change: Callable[[Any], object]) -> Path:
    """A copy of the speech file with one dataset changed."""
    path = folder / f"{name}.h5"
    path.write_bytes(prepared.read_bytes())
    with h5py.File(path, "r+") as file:
        values = file[dataset][:]
        change(values)
        file[dataset][...] = values
    return path


def test_a_file_that_cannot_be_trained_on_is_named_in_one_sentence(
    tmp_path: Path, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.h5").write_bytes(prepared.read_bytes()[:-1000])
    damaged(prepared, tmp_path, "label", "train/labels", lambda labels: labels.__setitem__(4, 29))
    damaged(prepared, tmp_path, "empty", "test/offsets", lambda offsets: offsets.__setitem__(1, 0))
    damaged(prepared, tmp_path, "short", "train/offsets", lambda ends: ends.__setitem__(1, ends[2] - 200))
    for name, message in {
        "none": r"none\.h5: no such file",
        "cut": r"cut\.h5: not a whole HDF5 file of speech: .*truncated.*",
        "label": r"label\.h5, split 'train': utterance \S+: label 29 is not in \[1, 29\)",
        "empty": r"empty\.h5, split 'test': utterance an4_test/s0/u0-test: 0 samples are not at least 1",
        "short": r"short\.h5, split 'train', utterance an4_train/s1/u1-train: \d frames of the network are fewer than .*",
    }.items():
        assert train_alone(tmp_path / "run.h5", tmp_path / f"{name}.h5", "training.steps=9") == 2
        said = capsys.readouterr().err
        assert re.fullmatch(rf"jobs\.train: {re.escape(str(tmp_path))}/{message}\n", said), said


@pytest.mark.skipif(not gpus(), reason="no GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_computes_the_losses_and_gradients_of_the_host(
    prepared: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by default cuDNN rounds to TF32, which moves the gradients' norm by 0.1 to 0.3 %
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    class Placed:
        def __init__(self, name: str) -> None:
            self.device = torch.device(name)

    found = []
    for name, kind in (("cpu", "float32"), ("cuda", precision)):
        workload = build_speech(
            config(prepared, f"training.precision={kind}", "data.tempo=[0.9,1.1]"), rank=0, size=1
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
