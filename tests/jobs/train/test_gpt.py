"""The language model in training: the shipped file, the loss of the next token, and what does not go together."""

from __future__ import annotations

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
from jobs.train.tasks.text import build_language, build_model

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "gpt.toml"
TINY = ("model.vocabulary=0", "model.positions=0", "model.layers=1", "model.hidden=64", "training.device=cpu")


@pytest.fixture
def text(documents: Path) -> str:
    return f"data.path={documents.with_name('contiguous.h5')}"


def test_the_shipped_file_has_the_optimizer_of_the_sweep_and_three_sizes() -> None:
    words = tuple(map(str, range(16_384)))
    texts = TextSet(contiguous([[[7] * 600]], Frame(512, 0, 0, 0)), words, "x.h5")
    sizes = {}
    for size, keys in re.findall(r"(\d+\.\d) M parameters(?:: --set ([^;\n]*))?", CONFIG.read_text()):
        config = load(CONFIG, ["data.path=x.h5", *keys.split()])
        with torch.device("meta"):
            model = build_model(config, texts)
        sizes[size] = round(sum(p.numel() for p in model.parameters()) / 1e6, 1)
        groups = build_optimizer(config.optimizer, model.parameters()).param_groups
        assert [(group["weight_decay"], group["betas"]) for group in groups] == [
            (decay, (0.9, 0.95)) for decay in (0.1, 0.0)
        ]
        assert [{p.ndim for p in group["params"]} for group in groups] == [{2}, {1}]
        assert (config.optimizer.clip_norm, config.schedule.name) == (1.0, "cosine")
        assert (config.schedule.unit, config.schedule.warmup, config.schedule.final) == ("run", 0.05, 0.1)
    assert sizes == {"17.1": 17.1, "5.0": 5.0, "98.0": 98.0}


def test_loss_and_score_are_the_mean_over_the_tokens_that_are_followed_by_one(text: str) -> None:
    config = load(CONFIG, [*TINY, text, "training.eval_batch_size=5"])
    workload = build_language(config, rank=0, size=1)
    tokens, labels = next(workload.batches(0))
    scores = workload.model(tokens)[:, :-1].log_softmax(2)
    told = scores.gather(2, tokens[:, 1:, None])[..., 0][labels[:, :-1] >= 0]
    assert workload.loss([tokens, labels]).item() == pytest.approx(-told.mean().item(), rel=1e-5)
    whole = workload.score()
    parts = [build_language(config, rank=rank, size=3).score() for rank in range(3)]
    assert sum(part.samples for part in parts) == whole.samples > 200
    assert sum(part.correct for part in parts) == whole.correct
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=TEXT", r"text\.h5: pairs of segments, .* gpt takes text .* with --contiguous"),
        ("model.positions=512", r"sequences of 32 tokens, but model\.positions is 512: 0 takes"),
        ("model.vocabulary=16384", r"a vocabulary of \d+ words, but model\.vocabulary is 16384"),
        ("data.name=digits", "model.name 'gpt' does not take data.name 'digits'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(
    documents: Path, text: str, capfd: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    words = [str(CONFIG), "--set", *TINY, text, override.replace("TEXT", str(documents))]
    if "digits" in override:
        words += ["data.path=", "data.eval_sequences=0"]
    assert main(words, comm=MPI.COMM_SELF) == 2
    assert re.search(message, capfd.readouterr().err)


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["oktopk", "sparseloco", "updates"])
def test_a_tiny_one_learns_text_that_the_test_makes(
    comm: MPI.Intracomm, documents: Path, tmp_path: Path, method: str
) -> None:
    path, folder = comm.bcast((documents.with_name("contiguous.h5"), tmp_path))
    words = [str(CONFIG), "--set", *TINY, f"data.path={path}", f"run.file={folder / 'run.h5'}"]
    words += ["training.batch_size=4", "training.steps=24", "data.eval_sequences=30", "optimizer.lr=1e-2"]
    # evaluated, and saved at the end, where ranks that step alone have parted
    words += ["training.eval_every=12", "reduction.sparseloco_steps=5"]
    if method == "updates":
        words += ["reduction.sends=updates", "reduction.every=5", "reduction.deferred=false"]
    else:
        words.append(f"reduction.method={method}")
    assert main([*words, "reduction.density=0.2"], comm=comm) == 0
    (run,) = read_runs([folder / "run.h5"])
    assert run.evaluations["loss"][-1] < 0.9 * run.steps["loss"][0]
    assert (run.steps["words"] > 0).sum() == (0 if comm.size == 1 else 24 if method == "oktopk" else 4)
