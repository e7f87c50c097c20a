"""Word embeddings in training: contexts from the text alone, ranks that share it, and tables that are reduced by row or whole."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from data.batches import EpochLoader
from data.text.file import TextSet, open_text_file
from data.text.loader import POSITIVE, ContextBatch, Contexts, mixed, word_counts
from jobs.config.file import ConfigError, load
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.placement import find_placement
from jobs.train.setup import set_up
from jobs.train.tasks.embeddings import build_embeddings
from tests.devices import asynchronous
from tests.tiny_runs import forget_the_end

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "embeddings.toml"
ROWS, WINDOW, NEGATIVES = 500, 3, 4
TINY = [
    f"model.rows={ROWS}",
    f"model.window={WINDOW}",
    f"model.negatives={NEGATIVES}",
    "data.eval_sequences=0",
    "optimizer.lr=3.0",
    "schedule.name=constant",
    "training.device=cpu",
    "training.batch_size=4",
    "training.eval_every=1000",
]


def loader(
    texts: TextSet, batch_size: int, rank: int = 0, size: int = 1, seed: int = 3
) -> EpochLoader[ContextBatch]:
    contexts = Contexts(texts, word_counts(texts), rows=ROWS, window=WINDOW, negatives=NEGATIVES)
    return contexts.training(batch_size=batch_size, rank=rank, size=size, seed=seed)


def equal(one: ContextBatch, other: ContextBatch) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_contexts_are_a_function_of_seed_and_epoch(documents: Path) -> None:
    texts, _ = open_text_file(documents)
    batch = loader(texts, 4).batch(1, 2)
    again = loader(texts, 4)
    again.batch(0, 5)
    assert equal(batch, again.batch(1, 2))
    assert not equal(batch, again.batch(0, 2))
    assert not equal(batch, loader(texts, 4, seed=4).batch(1, 2))


def test_a_context_stands_beside_its_pair_in_the_text(documents: Path) -> None:
    texts, _ = open_text_file(documents)
    training = loader(texts, 4)
    special = {texts.number(word) for word in ("[PAD]", "[CLS]", "[SEP]")}
    batch = training.batch(0, 3)
    allowed: list[tuple[int, int]] = []
    places = 0
    for sample in training.shards.indices(0, 3):
        line = texts.sequences.tokens[sample].tolist()
        for i in range(len(line) - 1):
            if {line[i], line[i + 1]} & special:
                continue
            places += 1
            number = torch.tensor(line[i] * len(texts.vocabulary) + line[i + 1])
            row = int((mixed(number) & POSITIVE) % ROWS)
            beside = [*range(i - WINDOW, i), *range(i + 2, i + 2 + WINDOW)]
            allowed += [(row, line[j]) for j in beside if 0 <= j < len(line) and line[j] not in special]
    pairs = list(zip(batch.centers.tolist(), batch.words[:, 0].tolist(), strict=True))
    assert set(pairs) <= set(allowed)
    assert places / 2 < len(pairs) <= places
    assert batch.words.shape == (len(pairs), 1 + NEGATIVES)


def test_words_are_drawn_by_their_counts(documents: Path) -> None:
    texts, _ = open_text_file(documents)
    drawn = np.concatenate([batch.words[:, 1:].flatten().numpy() for batch in loader(texts, 16).epoch(0)])
    weights = word_counts(texts) ** 0.75
    chances = weights / weights.sum()
    shares = np.bincount(drawn, minlength=len(chances)) / len(drawn)
    assert (shares[chances == 0] == 0).all()
    assert np.abs(shares - chances).max() < 5 * np.sqrt(chances.max() / len(drawn))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_pairs_of_a_step(ranks: int, documents: Path) -> None:
    texts, _ = open_text_file(documents)

    def pairs(batch: ContextBatch) -> Counter[tuple[int, ...]]:
        return Counter(
            (int(center), *words) for center, words in zip(batch.centers, batch.words.tolist(), strict=True)
        )

    whole = loader(texts, 4 * ranks)
    parts = [loader(texts, 4, rank, ranks) for rank in range(ranks)]
    assert {part.steps_per_epoch for part in parts} == {whole.steps_per_epoch}
    for step in range(3):
        shares = [pairs(part.batch(2, step)) for part in parts]
        assert sum(shares, Counter()) == pairs(whole.batch(2, step))


def test_the_score_is_that_of_all_pairs_however_they_are_shared(documents: Path) -> None:
    config = load(CONFIG, [*TINY, f"data.path={documents}", "training.eval_batch_size=5"])
    whole = build_embeddings(config, rank=0, size=1).score()
    parts = [build_embeddings(config, rank=rank, size=3).score() for rank in range(3)]
    assert sum(part.samples for part in parts) == whole.samples > 50
    assert sum(part.correct for part in parts) == whole.correct
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert whole.loss / whole.samples == pytest.approx((1 + NEGATIVES) * np.log(2), rel=1e-6)  # untrained


@pytest.mark.skipif(not asynchronous(), reason="no GPU")
def test_a_gpu_sees_the_same_batches_and_the_same_loss(documents: Path) -> None:
    config = load(CONFIG, [*TINY, f"data.path={documents}"])
    host, device = (build_embeddings(config, rank=1, size=2) for _ in range(2))
    device.move_to(find_placement("cuda", MPI.COMM_SELF))
    for left, right in zip(host.batches(2), device.batches(2), strict=True):
        assert torch.equal(left.centers, right.centers.cpu())
        assert torch.equal(left.words, right.words.cpu())
        assert device.loss(right).item() == pytest.approx(host.loss(left).item(), rel=1e-5)
    assert device.score().samples == host.score().samples


@pytest.mark.mpi
def test_dense_and_sparse_gradients_take_the_same_steps(documents: Path, comm: MPI.Intracomm) -> None:
    path = comm.bcast(str(documents))
    weights = {}
    for sparse in ("true", "false"):
        config = load(CONFIG, [*TINY, f"data.path={path}", f"model.sparse={sparse}", "training.steps=9"])
        setup = set_up(config, comm)
        batches = setup.workload.batches(0)
        for _ in range(5):
            setup.optimizer.zero_grad()
            setup.workload.loss(next(batches)).backward()
            report = setup.optimizer.reduce()
            setup.optimizer.apply()
        assert (report.row_bytes > 0) == (sparse == "true" and comm.size > 1)
        weights[sparse] = [parameter.detach().clone() for parameter in setup.workload.model.parameters()]
        setup.optimizer.close()
    for one, other in zip(weights["true"], weights["false"], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
        assert one.abs().max() > 1e-4


@pytest.mark.mpi
def test_the_loss_falls_and_a_run_that_was_stopped_ends_with_the_same_losses(
    documents: Path, tmp_path: Path, comm: MPI.Intracomm
) -> None:
    path, text = Path(comm.bcast(str(tmp_path / "run.h5"))), comm.bcast(str(documents))

    def run() -> np.ndarray:
        words = [*TINY, f"data.path={text}", f"run.file={path}"]
        more = ["training.steps=100", "checkpoint.every_steps=40"]
        assert main([str(CONFIG), "--set", *words, *more], comm=comm) == 0
        return np.asarray(comm.bcast(read_runs([path])[0].steps["loss"] if comm.rank == 0 else None))

    whole = run()
    assert whole[-10:].mean() < 0.8 * whole[:10].mean()
    done = comm.bcast(forget_the_end(path) if comm.rank == 0 else 0)
    again = run()
    assert 40 <= done < 100
    assert np.array_equal(again, whole[done:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reduction.method=nccl"], "model.sparse true is for the methods of oktopk, not for 'nccl'"),
        (["optimizer.momentum=0.9"], "model.sparse true needs optimizer.momentum 0.0, not 0.9"),
        (["optimizer.name=adam"], "model.sparse true needs optimizer.name 'sgd', not 'adam'"),
        (["training.cuda_graph=true"], "those of embeddings differ"),
        (
            ["data.name=digits", "data.path=", "data.eval_sequences=0"],
            "model.name 'skipgram' does not take data.name 'digits'",
        ),
    ],
)
def test_what_does_not_go_together_is_a_sentence(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(CONFIG, ["data.path=text.h5", *words])
