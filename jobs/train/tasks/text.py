"""Masked words and the next sentence by BERT: one rank's side of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from data.text.file import TextSet, open_text_file
from data.text.masking import IGNORED, TextBatch, TextEvaluationLoader, TextTrainingLoader
from jobs.config.config import Config
from jobs.config.sections import TrainingConfig
from jobs.train.placement import Placement
from jobs.train.tasks.factory import call_factory
from jobs.train.tasks.task import Score, WorkloadError, autocast, evaluating, naming
from models.bert import BERT


class MaskedLanguage:
    """Words that were masked, and whether the second segment follows the first, both by cross entropy: a Workload.

    Held-out text is scored by its masked words alone: a Score's samples are words.

    Args:
        model: see models.bert.BERT.forward.
        training: this rank's training batches.
        held_out: this rank's part of the held-out sequences.
        config: precision and compilation.
    """

    def __init__(
        self,
        model: nn.Module,
        training: TextTrainingLoader,
        held_out: TextEvaluationLoader,
        config: TrainingConfig,
    ) -> None:
        self.model = self.network = model
        self._config = config
        self.steps_per_epoch = training.steps_per_epoch
        self._training, self._held_out = training, held_out

    def move_to(self, placement: Placement) -> None:
        """Move network and text to a device. Raises DataError: they do not fit."""
        self._training.to(placement.device)
        self._held_out.to(placement.device)
        self.model.to(device=placement.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch, or those from first_step on."""
        return self._training.epoch(epoch, first_step)

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
        with autocast(self._config.precision, text.tokens.device):
            scores: tuple[torch.Tensor, torch.Tensor] = network(
                text.tokens, text.segments, text.present, text.places
            )
        return scores

    def score(self) -> Score:
        """Summed cross entropy of the held-out masked words, and how many of them are found."""
        device = next(self.model.parameters()).device
        # on the device, so that it is waited for once
        loss, correct, count = torch.zeros(3, dtype=torch.float64, device=device)
        with evaluating(self.model):
            for text in self._held_out:
                words, labels = self._scores(self.model, text)[0].flatten(0, 1), text.labels.flatten()
                loss += nn.functional.cross_entropy(
                    words.float(), labels, ignore_index=IGNORED, reduction="sum"
                )
                correct += (words.argmax(dim=1) == labels).sum()
                count += (labels != IGNORED).sum()
        return Score(float(loss), int(correct), int(count))


def build_language(config: Config, *, rank: int, size: int) -> MaskedLanguage:
    """The workload of a rank; the weights are equal on all ranks, dropout is each rank's own.

    Raises:
        DataError: text that is missing, broken, or too little for the ranks.
        WorkloadError: a vocabulary or a length that does not go with the model.
    """
    training, held_out = open_text_file(config.data.path)
    model = call_factory(config) if config.model.factory else build_bert(config, training)
    with naming("data"):
        loader = TextTrainingLoader(
            training,
            batch_size=config.training.batch_size,
            rank=rank,
            size=size,
            seed=config.training.seed,
        )
    held_out_loader = TextEvaluationLoader(
        held_out,
        batch_size=config.training.eval_batch_size,
        rank=rank,
        size=size,
        most=config.data.eval_sequences,
    )
    seeds = np.random.SeedSequence([config.training.seed, rank])
    torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    return MaskedLanguage(model, loader, held_out_loader, config.training)


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
