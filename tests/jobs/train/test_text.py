"""BERT in training: text that the test makes is learnt, and what does not go together is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from jobs.config.file import ConfigError, load
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.optimizers import build_optimizer, learning_rate_factor
from jobs.train.placement import find_placement
from jobs.train.setup import build_workload
from jobs.train.tasks.text import MaskedLanguage, build_language
from tests.devices import gpus
from tests.launched import run_ranks
from tests.tiny_runs import forget_the_end

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "bert.toml"
TINY = [
    "model.vocabulary=0",
    "model.layers=1",
    "model.hidden=64",
    "model.dropout=0.0",
    "optimizer.lr=1e-3",
    "schedule.name=constant",
    "reduction.density=0.2",
    "reduction.threshold_interval=8",
    "reduction.boundary_interval=8",
    "training.device=cpu",
    "training.batch_size=16",
    "training.eval_every=1000",
]


def overrides(documents: Path, *more: str) -> list[str]:
    return [*TINY, f"data.path={documents}", *more]


@pytest.mark.long("trains until text is learnt; in `make test` the loss falls")
@pytest.mark.timeout(150)
def test_a_tiny_bert_on_ranks_learns_text_that_the_test_makes(tmp_path: Path, documents: Path) -> None:
    path = tmp_path / "run.h5"
    more = overrides(documents, f"run.file={path}", "training.steps=120", "training.batch_size=8")
    done = run_ranks(2, "-m", "jobs.train", str(CONFIG), "--set", *more)
    assert done.returncode == 0, done.stderr
    (run,) = read_runs([path])
    assert (run.status, run.count, run.info.ranks, run.info.method) == ("complete", 120, 2, "oktopk")
    assert run.steps["loss"][:5].mean() > math.log(10)
    assert run.steps["loss"][-20:].mean() < 0.6 * run.steps["loss"][:20].mean()
    assert run.evaluations["loss"][-1] < 2.0
    assert run.evaluations["accuracy"][-1] > 0.3
    assert run.steps["words"].mean() <= run.upper_bound


@pytest.mark.timeout(150)
def test_an_interrupted_run_ends_with_the_same_losses(tmp_path: Path, documents: Path) -> None:
    path = tmp_path / "run.h5"
    settings = ["model.dropout=0.1", "training.steps=12", f"run.file={path}", "checkpoint.every_steps=5"]

    def run() -> np.ndarray:
        assert main([str(CONFIG), "--set", *overrides(documents, *settings)], comm=MPI.COMM_SELF) == 0
        return np.asarray(read_runs([path])[0].steps["loss"])

    whole = run()
    # after step 10; 5, or what came after 10, where the disk was still busy with the set before
    done = forget_the_end(path)
    assert 5 <= done < 12
    assert run().tolist() == whole[done:].tolist()


def test_ranks_share_weights_but_neither_text_nor_dropout(documents: Path) -> None:
    config = load(CONFIG, overrides(documents))
    batches, draws, weights = [], [], []
    for rank in range(2):
        workload = build_workload(config, rank=rank, size=2)
        assert isinstance(workload, MaskedLanguage)
        batches.append(next(workload.batches(0)))
        draws.append(torch.rand(4))
        weights.append(torch.cat([p.detach().flatten() for p in workload.model.parameters()]))
    assert torch.equal(*weights)
    assert not torch.equal(*draws)
    assert not torch.equal(batches[0][0], batches[1][0])


def test_text_without_pairs_has_the_loss_of_its_words(documents: Path) -> None:
    workload = build_language(load(CONFIG, overrides(documents)), rank=0, size=1)
    batch = next(workload.batches(0))
    alone = (*batch[:5], torch.full_like(batch[5], -100))
    both, words = workload.loss(batch), workload.loss(alone)
    assert torch.isfinite(words)
    # before training both answers are as good as a guess
    assert (both - words).item() == pytest.approx(math.log(2), abs=0.2)


def test_the_score_is_the_mean_over_masked_words_however_they_are_shared(documents: Path) -> None:
    config = load(CONFIG, overrides(documents, "training.eval_batch_size=5"))
    whole = build_language(config, rank=0, size=1).score()
    parts = [build_language(config, rank=rank, size=3).score() for rank in range(3)]
    assert sum(part.samples for part in parts) == whole.samples > 50
    assert sum(part.correct for part in parts) == whole.correct
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-4)


@pytest.mark.skipif(not gpus(), reason="no GPU")
def test_a_gpu_sees_the_same_batches_and_the_same_loss(documents: Path) -> None:
    config = load(CONFIG, overrides(documents))
    host, device = (build_language(config, rank=1, size=2) for _ in range(2))
    device.move_to(find_placement("cuda", MPI.COMM_SELF))
    for step, (left, right) in enumerate(zip(host.batches(2), device.batches(2), strict=True)):
        for name, one, other in zip(left._fields, left, right, strict=True):
            assert torch.equal(one, other.cpu()), f"{name} of step {step}"
    losses = [workload.loss(next(workload.batches(0))) for workload in (host, device)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for loss in losses:
        loss.backward()
    for (name, one), other in zip(host.model.named_parameters(), device.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-2, atol=1e-4, msg=name)
    assert device.score().loss == pytest.approx(host.score().loss, rel=1e-3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocabulary=30522", r"text\.h5: a vocabulary of \d+ words, but model\.vocabulary is 30522"),
        ("training.batch_size=100000", r"text\.h5: \d+ samples are fewer than the 100000 of one step"),
        ("data.path=nowhere.h5", r"nowhere\.h5: no such file"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(
    documents: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    more = overrides(documents, f"run.file={tmp_path / 'run.h5'}", override)
    assert main([str(CONFIG), "--set", *more], comm=MPI.COMM_SELF) == 2
    assert re.search(message, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.name=prepared data.eval_sequences=0", "model.name 'bert' does not take data.name 'prepared'"),
        ("optimizer.name=adam", "bias_correction false is for adamw, not for adam"),
        ("model.hidden=100", "multiple of 64"),
        ("schedule.warmup=2", r"a warmup of 2.0 runs is not in \[0, 1\]"),
    ],
)
def test_settings_that_contradict_each_other_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(CONFIG, ["data.path=text.h5", *override.split()])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_without_correction_follows_its_formula(decay: float) -> None:
    config = load(CONFIG, ["data.path=text.h5", f"optimizer.weight_decay={decay}"]).optimizer
    matrix, vector = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))
    optimizer = build_optimizer(config, [matrix, vector])
    expected = [matrix.detach().double().clone(), vector.detach().double().clone()]
    means = [[torch.zeros_like(one), torch.zeros_like(one)] for one in expected]
    for step in range(6):
        rate = 0.0 if step == 3 else 0.01 * (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for number, parameter in enumerate((matrix, vector)):
            parameter.grad = torch.randn_like(parameter)
            slope, (first, second) = parameter.grad.double(), means[number]
            first.mul_(0.9).add_(0.1 * slope)
            second.mul_(0.999).add_(0.001 * slope**2)
            shrink = 1 - rate * (decay if number == 0 else 0.0)
            expected[number] = expected[number] * shrink - rate * first / (second.sqrt() + 1e-6)
        optimizer.step()
        if step == 2:  # as after a restart
            state = optimizer.state_dict()
            optimizer = build_optimizer(config, [matrix, vector])
            optimizer.load_state_dict(state)
    for parameter, reference in zip((matrix, vector), expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), reference, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["eps"] == 1e-6


def test_the_shipped_schedule_rises_over_a_tenth_of_the_run_and_falls_over_the_rest() -> None:
    schedule = load(CONFIG, ["data.path=text.h5"]).schedule
    factors = [
        learning_rate_factor(schedule, step, steps=100, steps_per_epoch=7, ranks=4) for step in range(100)
    ]
    assert factors[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert np.diff(factors[10:]) == pytest.approx(-1 / 89)
    assert factors[-1] == pytest.approx(0.0)
