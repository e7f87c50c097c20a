"""Interface of a training task: network, batches, loss, score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from data import DataError
from data.batches import EpochLoader, HeldOut, HeldOutPlace, Place
from jobs.config.sections import TrainingConfig
from jobs.train.placement import Placement

Batch = TypeVar("Batch")


class WorkloadError(ValueError):
    """Settings and data that are fine by themselves and do not go together."""


@dataclass(frozen=True)
class Score:
    """Sums over some held-out samples (of speech the words, of text the masked ones); scores of disjoint shards add up.

    Of speech also the wrong characters, and how many were said.
    """

    loss: float
    correct: int
    samples: int
    character_errors: int = 0
    characters: int = 0


class Workload(ABC, Generic[Batch]):
    """One rank's side of a training task, on loaders of this rank. Nothing in it communicates.

    Args:
        model: holds the parameters.
        training: this rank's training batches.
        held_out: this rank's part of the held-out samples.
        precision: of the network's arithmetic, see `autocast`.

    Attributes:
        model: as given.
        network: what a loss is computed with: the model, or what was wrapped around it.
        steps_per_epoch: batches of an epoch.
    """

    def __init__(
        self, model: nn.Module, training: EpochLoader[Batch], held_out: HeldOut[Batch], precision: str
    ) -> None:
        self.model = self.network = model
        self.steps_per_epoch = training.steps_per_epoch
        self._training, self._held_out, self._precision = training, held_out, precision

    def move_to(self, placement: Placement) -> None:
        """Move network and data to a device. Raises DataError: they do not fit."""
        self._training.to(placement.device)
        self._held_out.to(placement.device)
        self.model.to(placement.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch, steps_per_epoch of them, or those from first_step on."""
        return self._training.epoch(epoch, first_step)

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch, to be differentiated."""

    @abstractmethod
    def _counts(self, batch: Batch) -> Iterable[torch.Tensor | int]:
        """The fields of Score for a held-out batch, in their order; the last two may be left out."""

    def score(self) -> Score:
        """This rank's share of the held-out samples, measured without training on them."""
        device = next(self.model.parameters()).device
        # on the device, so that it is waited for once
        sums: list[Any] = [torch.zeros((), dtype=torch.float64, device=device), 0, 0, 0, 0]
        with evaluating(self.model):
            for batch in self._held_out:
                sums = [total + count for total, count in zip_longest(sums, self._counts(batch), fillvalue=0)]
        loss, *counts = sums
        return Score(float(loss), *map(int, counts))


def training_place(config: TrainingConfig, rank: int, size: int) -> Place:
    """What a rank trains on."""
    return {"batch_size": config.batch_size, "rank": rank, "size": size, "seed": config.seed}


def held_out_place(config: TrainingConfig, rank: int, size: int) -> HeldOutPlace:
    """What a rank evaluates."""
    return {"batch_size": config.eval_batch_size, "rank": rank, "size": size}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation in the block, and back to training after it."""
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train()


@contextmanager
def naming(section: str) -> Iterator[None]:
    """Turn a ValueError in the block, unless a DataError, into a WorkloadError that names the section of the configuration."""
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        raise WorkloadError(f"{section}: {error}") from error


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """torch's autocast to that precision; nothing for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))
