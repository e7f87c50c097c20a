"""Embeddings of word pairs by skip-gram with negative sampling: one rank's side of it."""

from __future__ import annotations

import torch
from torch import nn

from data.text.file import open_text_file
from data.text.loader import ContextBatch, Contexts, word_counts
from jobs.config.config import Config
from jobs.train.tasks.task import Workload
from models.skipgram import SkipGram


class Embeddings(Workload[ContextBatch]):
    """Words beside word pairs are told from words drawn at random.

    The loss of a pair is the sum of 1 + negatives binary cross entropies. A score's samples are pairs. One is right where the
    word beside it scores higher than all that were drawn. The model takes centers and words, and returns scores.
    """

    def loss(self, batch: ContextBatch) -> torch.Tensor:
        """Mean loss of the pairs of a batch; 0 where it has none."""
        return self._losses(self._scores(self.network, batch)).sum() / max(1, len(batch.centers))

    def _scores(self, network: nn.Module, batch: ContextBatch) -> torch.Tensor:
        scores: torch.Tensor = self._run(network, *batch)
        return scores.float()

    def _losses(self, scores: torch.Tensor) -> torch.Tensor:
        """float32[m]: those of some pairs."""
        signs = torch.full_like(scores[:1], -1.0)
        signs[:, :1] = 1.0
        return -nn.functional.logsigmoid(signs * scores).sum(dim=1)

    def _counts(self, batch: ContextBatch) -> tuple[torch.Tensor, torch.Tensor, int]:
        scores = self._scores(self.model, batch)
        return self._losses(scores).sum(), (scores[:, :1] > scores[:, 1:]).all(dim=1).sum(), len(scores)


def build_embeddings(config: Config, *, rank: int, size: int) -> Embeddings:
    """The workload of a rank; the weights are equal on all ranks.

    Raises:
        DataError: text that is missing, broken, or too little for the ranks.
        WorkloadError: a table that cannot be made.
    """
    settings = config.model
    texts, held_out = open_text_file(config.data.path)
    counts = word_counts(texts)
    contexts, apart = (
        Contexts(split, counts, rows=settings.rows, window=settings.window, negatives=settings.negatives)
        for split in (texts, held_out)
    )

    def make() -> SkipGram:
        return SkipGram(settings.rows, len(texts.vocabulary), width=settings.hidden, sparse=settings.sparse)

    return Embeddings(make, contexts, apart, config, rank=rank, size=size)
