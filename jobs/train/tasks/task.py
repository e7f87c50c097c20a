"""Interface of a training task: network, batches, loss, score; the network of model.factory."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from data import DataError
from data.batches import Source
from jobs.config.config import Config
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
    """One rank's side of a training task. Nothing in it communicates.

    Args:
        make: makes the network, as build_network has it; called when there are data enough for the ranks.
        training, held_out: what its batches are cut from.
        config: of the run.
        rank, size: this rank's place.

    Raises:
        DataError: too little data for the ranks.
        WorkloadError: the network cannot be made.

    Attributes:
        model: holds the parameters.
        network: what a loss is computed with: the model, or what was wrapped around it.
        steps_per_epoch: batches of an epoch.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        training: Source[Batch],
        held_out: Source[Batch],
        config: Config,
        *,
        rank: int,
        size: int,
    ) -> None:
        own = config.training
        self._training = training.training(batch_size=own.batch_size, seed=own.seed, rank=rank, size=size)
        self._held_out = held_out.held_out(
            batch_size=own.eval_batch_size, most=config.data.eval_sequences, rank=rank, size=size
        )
        self.steps_per_epoch = self._training.steps_per_epoch
        self._config = config
        self.model = self.network = build_network(config, make)

    def move_to(self, placement: Placement) -> None:
        """Move network and data to a device. Raises DataError: they do not fit."""
        self._training.source.to(placement.device)
        self._held_out.source.to(placement.device)
        self.model.to(placement.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch, steps_per_epoch of them, or those from first_step on."""
        return self._training.epoch(epoch, first_step)

    def _run(self, network: nn.Module, *inputs: torch.Tensor) -> Any:
        """What a network makes of its inputs, in the precision of the run."""
        with autocast(self._config.training.precision, inputs[0].device):
            return network(*inputs)

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
    except (DataError, WorkloadError):
        raise
    except ValueError as error:
        raise WorkloadError(f"{section}: {error}") from error


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """torch's autocast to that precision; not enabled for float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def build_network(config: Config, make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` returns, or model.factory for the keywords of model.arguments; torch is seeded by training.seed before.

    The factory's must suit the data set, as the network that trains on it otherwise:

        images: images[batch, channels, height, width] -> logits[batch, classes], see models.vgg.VGG16
        speech: spectrograms, frames -> logits, output frames, see models.lstm.LSTM.forward
        text: tokens, segments, present, places -> words, follows, see models.bert.BERT.forward

    Raises:
        WorkloadError: a ValueError of either; of the factory no such module or attribute, keywords that do not fit, or a result
            that is no torch.nn.Module with parameters to train. Other errors inside the user's code keep their traceback.
    """
    name = config.model.factory
    if name:
        make = _factory(name, config.model.arguments)
    torch.manual_seed(config.training.seed)
    with naming(f"model.factory {name!r}" if name else "model"):
        network = make()
    if not isinstance(network, nn.Module):
        raise WorkloadError(
            f"model.factory {name!r} returned a {type(network).__name__}, not a torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise WorkloadError(f"model.factory {name!r} returned a network without parameters to train")
    return network


def _factory(name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """The callable of that name with its arguments. Raises WorkloadError."""
    module = name.partition(":")[0]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of what the module imports
        package = module.partition(".")[0]
        raise WorkloadError(
            f"model.factory {name!r}: {error}: put the folder that holds {package} on PYTHONPATH, or install it"
        ) from error
    try:
        factory = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise WorkloadError(f"model.factory {name!r}: {error}") from error
    if not callable(factory):
        raise WorkloadError(f"model.factory {name!r} is a {type(factory).__name__}, which cannot be called")
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise WorkloadError(f"model.arguments do not fit {name!r}: {error}") from error
    return partial(factory, **arguments)
