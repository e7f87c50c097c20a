"""Masked words and the next sentence by BERT: one rank's side of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from data.text.file import TextSet, open_text_file
from data.text.masking import IGNORED, TextBatch, TextEvaluationLoader, TextTrainingLoader
from jobs.config.config import Config
from jobs.train.tasks.factory import call_factory
from jobs.train.tasks.task import Task, WorkloadError, autocast, held_out_place, naming, training_place
from models.bert import BERT


class MaskedLanguage(Task[TextBatch]):
    """Words that were masked, and whether the second segment follows the first, both by cross entropy.

    Held-out text is scored by its masked words alone: a Score's samples are words. The model is as models.bert.BERT.
    """

    def loss(self, batch: Any) -> torch.Tensor:
        """Mean cross entropy of a batch's masked words, and that of its pairs of segments where there are any."""
        text = TextBatch(*batch)
        words, follows = self._scores(self.network, text)
        masked = nn.functional.cross_entropy(
            words.flatten(0, 1).float(), text.labels.flatten(), ignore_index=IGNORED
        )
        pairs = nn.functional.cross_entropy(
            follows.float(), text.follows, ignore_index=IGNORED, reduction="sum"
        )
        return masked + pairs / (text.follows != IGNORED).sum().clamp(min=1)

    def _scores(self, network: nn.Module, text: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast(self._precision, text.tokens.device):
            scores: tuple[torch.Tensor, torch.Tensor] = network(
                text.tokens, text.segments, text.present, text.places
            )
        return scores

    def _counts(self, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        words, labels = self._scores(self.model, batch)[0].flatten(0, 1), batch.labels.flatten()
        loss = nn.functional.cross_entropy(words.float(), labels, ignore_index=IGNORED, reduction="sum")
        return loss, (words.argmax(dim=1) == labels).sum(), (labels != IGNORED).sum()


def build_language(config: Config, *, rank: int, size: int) -> MaskedLanguage:
    """The workload of a rank; the weights are equal on all ranks, dropout is each rank's own.

    Raises:
        DataError: text that is missing, broken, or too little for the ranks.
        WorkloadError: a vocabulary or a length that does not go with the model.
    """
    training, held_out = open_text_file(config.data.path)
    model = call_factory(config) if config.model.factory else build_bert(config, training)
    with naming("data"):
        loader = TextTrainingLoader(training, **training_place(config.training, rank, size))
    place = held_out_place(config.training, rank, size)
    held_out_loader = TextEvaluationLoader(held_out, most=config.data.eval_sequences, **place)
    seeds = np.random.SeedSequence([config.training.seed, rank])
    torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    return MaskedLanguage(model, loader, held_out_loader, config.training.precision)


def build_bert(config: Config, texts: TextSet) -> BERT:
    """The network for a text, seeded by training.seed.

    Raises:
        WorkloadError: its vocabulary or length does not fit.
    """
    settings, words = config.model, len(texts.vocabulary)
    if settings.vocabulary not in (0, words):
        raise WorkloadError(
            f"{texts.path}: a vocabulary of {words} words, but model.vocabulary is {settings.vocabulary}: "
            "0 takes that of the file"
        )
    torch.manual_seed(config.training.seed)
    with naming("model"):
        model = BERT(words, layers=settings.layers, hidden=settings.hidden, dropout=settings.dropout)
    if texts.length > model.positions:
        raise WorkloadError(
            f"{texts.path}: sequences of {texts.length} tokens are longer than the model's {model.positions}"
        )
    return model
