"""Language: the next token by GPT, masked words and the next sentence by BERT: one rank's side of it."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from data.text.file import TextSet, open_text_file
from data.text.loader import IGNORED, MaskedText, NextTokens, TextBatch, TokenBatch
from data.text.packing import NO_PAIR
from jobs.config.config import Config
from jobs.train.tasks.task import Batch, Workload, WorkloadError
from models.bert import BERT
from models.gpt import GPT


class Language(Workload[Batch]):
    """Words to predict, by cross entropy. Held-out text is scored by these words: they are a Score's samples."""

    @abstractmethod
    def _words(self, network: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """float[m, vocabulary], scores, and int64[m], the words, IGNORED where there is none."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Mean cross entropy of a batch's words."""
        return _cross_entropy(*self._words(self.network, batch))

    def _counts(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, words = self._words(self.model, batch)
        loss = _cross_entropy(scores, words, reduction="sum")
        return loss, (scores.argmax(dim=1) == words).sum(), (words != IGNORED).sum()


class NextToken(Language[TokenBatch]):
    """What follows each token. The model is as models.gpt.GPT."""

    def _words(self, network: nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = batch
        scores: torch.Tensor = self._run(network, tokens)
        return scores.flatten(0, 1), labels.flatten()


class MaskedLanguage(Language[TextBatch]):
    """Words that were masked, and whether the second segment follows the first. The model is as models.bert.BERT."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Mean cross entropy of a batch's masked words, and that of its pairs of segments where there are any."""
        text = TextBatch(*batch)
        words, follows = self._run(self.network, *text[:4])  # tokens, segments, present, places
        pairs = _cross_entropy(follows, text.follows, reduction="sum")
        masked = _cross_entropy(words.flatten(0, 1), text.labels.flatten())
        return masked + pairs / (text.follows != IGNORED).sum().clamp(min=1)

    def _words(self, network: nn.Module, batch: TextBatch) -> tuple[torch.Tensor, torch.Tensor]:
        words, _ = self._run(network, *batch[:4])
        return words.flatten(0, 1), batch.labels.flatten()


def _cross_entropy(scores: torch.Tensor, classes: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return nn.functional.cross_entropy(scores.float(), classes, ignore_index=IGNORED, reduction=reduction)


def build_language(config: Config, *, rank: int, size: int) -> Language[Any]:
    """The workload of a rank; the weights are equal on all ranks, dropout is each rank's own.

    Raises:
        DataError: text that is missing, broken, or too little for the ranks.
        WorkloadError: a vocabulary, a length or pairs of segments that do not go with the model.
    """
    training, held_out = open_text_file(config.data.path)
    kinds: dict[str, tuple[Any, Any]] = {"gpt": (NextToken, NextTokens)}
    kind, cut = kinds.get(config.model.name, (MaskedLanguage, MaskedText))
    make = partial(make_network, config, training)
    language: Language[Any] = kind(make, cut(training), cut(held_out), config, rank=rank, size=size)
    seeds = np.random.SeedSequence([config.training.seed, rank])
    torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
    return language


def make_network(config: Config, texts: TextSet) -> BERT | GPT:
    """The network for a text. Raises ValueError: its vocabulary, length or pairs of segments do not fit."""
    settings, words = config.model, len(texts.vocabulary)
    if settings.vocabulary not in (0, words):
        raise WorkloadError(
            f"{texts.path}: a vocabulary of {words} words, but model.vocabulary is {settings.vocabulary}: "
            "0 takes that of the file"
        )
    if settings.positions not in (0, texts.length):
        raise WorkloadError(
            f"{texts.path}: sequences of {texts.length} tokens, but model.positions is {settings.positions}: "
            "0 takes those of the file"
        )
    shape = {"layers": settings.layers, "hidden": settings.hidden}
    if settings.name == "gpt":
        if (texts.sequences.follows != NO_PAIR).any():
            raise WorkloadError(
                f"{texts.path}: pairs of segments, and the second may be from elsewhere: gpt takes text that "
                "data.prepare wrote with --contiguous"
            )
        return GPT(words, positions=texts.length, **shape)
    model = BERT(words, dropout=settings.dropout, **shape)
    if texts.length > model.positions:
        raise WorkloadError(
            f"{texts.path}: sequences of {texts.length} tokens are longer than the model's {model.positions}"
        )
    return model
