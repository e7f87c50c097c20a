"""Word embeddings in training: contexts from the text alone, ranks that share it, and tables that are reduced by row or whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from data.batches import EpochLoader
from data.text.file import TextSet, open_text_file
from data.text.loader import POSITIVE, ContextBatch, Contexts, mixed, word_counts
from jobs.train.setup import set_up
from tests.jobs.train.conftest import Configured

ROWS, WINDOW, NEGATIVES = 500, 3, 4


def loader(
    texts: TextSet, batch_size: int, rank: int = 0, size: int = 1, seed: int = 3
) -> EpochLoader[ContextBatch]:
    contexts = Contexts(texts, word_counts(texts), rows=ROWS, window=WINDOW, negatives=NEGATIVES)
    return contexts.training(batch_size=batch_size, rank=rank, size=size, seed=seed)


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


@pytest.mark.mpi
def test_dense_and_sparse_gradients_take_the_same_steps(configured: Configured, comm: MPI.Intracomm) -> None:
    weights = {}
    for sparse in ("true", "false"):
        setup = set_up(
            comm.bcast(configured("embeddings", f"model.sparse={sparse}", "training.steps=9")), comm
        )
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
