"""BERT and GPT in training: their shipped files and losses, and text that the test makes is learnt."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from data.text.file import TextSet
from data.text.packing import Frame, contiguous
from jobs.config.file import load
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.optimizers import build_optimizer
from jobs.train.setup import build_workload
from jobs.train.tasks.text import make_network
from oktopk.torch.arguments import default_method, default_sends, default_start
from tests.jobs.train.conftest import CONFIGS, Configured, Words

BERT = CONFIGS / "bert.toml"


def test_text_without_pairs_has_the_loss_of_its_words(configured: Configured) -> None:
    workload = build_workload(configured("bert"), rank=0, size=1)
    batch = next(workload.batches(0))
    alone = (*batch[:5], torch.full_like(batch[5], -100))
    both, words = workload.loss(batch), workload.loss(alone)
    assert torch.isfinite(words)
    # before training both answers are as good as a guess
    assert (both - words).item() == pytest.approx(math.log(2), abs=0.2)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_without_correction_follows_its_formula(decay: float) -> None:
    config = load(BERT, ["data.path=text.h5", f"optimizer.weight_decay={decay}"]).optimizer
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


def test_gpts_shipped_file_has_three_sizes() -> None:
    words = tuple(map(str, range(16_384)))
    texts = TextSet(contiguous([[[7] * 600]], Frame(512, 0, 0, 0)), words, "x.h5")
    sizes, file = {}, CONFIGS / "gpt.toml"
    for size, keys in re.findall(r"(\d+\.\d) M parameters(?:: --set ([^;\n]*))?", file.read_text()):
        config = load(file, ["data.path=x.h5", *keys.split()])
        with torch.device("meta"):
            model = make_network(config, texts)
        sizes[size] = round(sum(p.numel() for p in model.parameters()) / 1e6, 1)
        groups = build_optimizer(config.optimizer, model.parameters()).param_groups
        assert [(group["weight_decay"], group["betas"]) for group in groups] == [
            (decay, (0.9, 0.95)) for decay in (0.1, 0.0)
        ]
        assert [{p.ndim for p in group["params"]} for group in groups] == [{2}, {1}]
        assert (config.optimizer.clip_norm, config.schedule.name) == (1.0, "cosine")
        assert (config.schedule.unit, config.schedule.warmup, config.schedule.final) == ("run", 0.05, 0.1)
    assert sizes == {"17.1": 17.1, "5.0": 5.0, "98.0": 98.0}


def test_gpts_shipped_file_sends_what_the_library_does_by_default() -> None:
    config = load(CONFIGS / "gpt.toml", ["data.path=x.h5"])
    optimizer = build_optimizer(config.optimizer, [torch.nn.Parameter(torch.zeros(3, 4))])
    reduction = config.reduction
    assert reduction.sends == default_sends(optimizer, None, reduction.density) == "updates"
    assert reduction.method == default_method(reduction.sends, reduction.density, reduction.every)
    start = default_start(optimizer, reduction.sends, reduction.every, 12, {})
    assert start == {"density_warmup_steps": reduction.density_warmup_steps}


def test_gpts_loss_is_the_mean_over_tokens_that_one_follows(configured: Configured) -> None:
    workload = build_workload(configured("gpt"), rank=0, size=1)
    tokens, labels = next(workload.batches(0))
    scores = workload.model(tokens)[:, :-1].log_softmax(2)
    told = scores.gather(2, tokens[:, 1:, None])[..., 0][labels[:, :-1] >= 0]
    assert workload.loss([tokens, labels]).item() == pytest.approx(-told.mean().item(), rel=1e-5)


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["oktopk", "updates"])
def test_a_tiny_gpt_learns_text(comm: MPI.Intracomm, tmp_path: Path, method: str, words: Words) -> None:
    given, folder = comm.bcast((words("gpt"), tmp_path))
    given += [f"run.file={folder / 'run.h5'}", "data.eval_sequences=30", "optimizer.lr=1e-2"]
    # evaluated, and saved at the end, where ranks that step alone have parted
    given += ["training.batch_size=4", "training.steps=24", "training.eval_every=12"]
    given.append("reduction.density=0.2")
    if method == "updates":  # as the file has it
        given += ["reduction.every=5", "reduction.density_warmup_steps=0"]
    else:
        given += ["reduction.sends=gradients", f"reduction.method={method}", "reduction.deferred=true"]
    assert main(given, comm=comm) == 0
    (run,) = read_runs([folder / "run.h5"])
    assert run.evaluations["loss"][-1] < 0.9 * run.steps["loss"][0]
    assert (run.steps["words"] > 0).sum() == (0 if comm.size == 1 else 24 if method == "oktopk" else 4)
