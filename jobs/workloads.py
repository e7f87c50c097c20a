"""What is trained: from a configuration to a network, a rank's batches and its share of the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from data import DataError
from data.cifar10 import open_cifar10
from data.digits import load_digits
from data.image_file import open_image_file
from data.images import Augment, ImageSet
from data.loader import Batch, EvaluationLoader, EvaluationSource, TrainingLoader, TrainingSource
from jobs.config import Config, DataConfig, OptimizerConfig
from jobs.placement import Placement
from models.vgg import REDUCTION, VGG16


class WorkloadError(ValueError):
    """Settings and data that are fine by themselves and do not go together."""


@dataclass(frozen=True)
class Score:
    """Sums over some held-out samples; scores of disjoint shards add up."""

    loss: float
    correct: int
    samples: int


class Workload(Protocol):
    """One rank's side of a training task. Nothing in it communicates."""

    model: nn.Module
    steps_per_epoch: int

    def place(self, placement: Placement) -> None:
        """Move network and data to a device. Raises DataError: they do not fit."""
        ...

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch, steps_per_epoch of them, or those from first_step on."""
        ...

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch, to be differentiated."""
        ...

    def score(self) -> Score:
        """This rank's share of the held-out samples, measured without training on them."""
        ...


class Classification:
    """Images into classes by cross entropy: a Workload.

    Args:
        model: images -> logits[batch, classes].
        training: this rank's training batches.
        held_out: this rank's part of the held-out samples.
    """

    def __init__(self, model: nn.Module, training: TrainingLoader, held_out: EvaluationLoader) -> None:
        self.model = model
        self.steps_per_epoch = training.steps_per_epoch
        self._loaders = training, held_out
        self._training: TrainingSource = training
        self._held_out: EvaluationSource = held_out

    def place(self, placement: Placement) -> None:
        """Move network and data to a device. Raises DataError: they do not fit."""
        training, held_out = self._loaders
        self._training = placement.training_source(training)
        self._held_out = placement.evaluation_source(held_out)
        self.model.to(placement.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch, or those from first_step on."""
        return self._training.epoch(epoch, first_step)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def score(self) -> Score:
        """Summed cross entropy, and how many of the held-out samples are classed right."""
        samples = 0
        # on the device, so that it is waited for once
        device = next(self.model.parameters()).device
        loss, correct = torch.zeros(2, dtype=torch.float64, device=device)
        self.model.eval()
        try:
            with torch.inference_mode():
                for images, labels in self._held_out:
                    logits = self.model(images)
                    loss += nn.functional.cross_entropy(logits, labels, reduction="sum")
                    correct += (logits.argmax(dim=1) == labels).sum()
                    samples += len(labels)
        finally:
            self.model.train()
        return Score(float(loss), int(correct), samples)


def build_workload(config: Config, *, rank: int, size: int) -> Workload:
    """The workload that a configuration describes, as one rank sees it; the weights are equal on all ranks.

    Raises:
        DataError: data that is missing, broken, or too little for the ranks.
        WorkloadError: settings and data that do not go together.
    """
    training, held_out = load_images(config.data)
    augment = Augment(config.data.crop, config.data.flip) if config.data.crop or config.data.flip else None
    try:
        loader = TrainingLoader(
            training,
            batch_size=config.training.batch_size,
            rank=rank,
            size=size,
            seed=config.training.seed,
            augment=augment,
        )
    except DataError:
        raise
    except ValueError as error:
        raise WorkloadError(f"data: {error}") from error
    held_out_loader = EvaluationLoader(
        held_out, batch_size=config.training.eval_batch_size, rank=rank, size=size
    )
    return Classification(build_model(config, training), loader, held_out_loader)


def load_images(config: DataConfig) -> tuple[ImageSet, ImageSet]:
    """The training and the held-out images. Raises DataError."""
    if config.name == "digits":
        return load_digits(size=config.size, held_out=config.held_out)
    return open_cifar10(config.path) if config.name == "cifar10" else open_image_file(config.path)


def build_model(config: Config, images: ImageSet) -> nn.Module:
    """The network for these images, seeded by training.seed.

    Raises:
        WorkloadError: it does not take such images.
    """
    channels, height, width = images.shape
    if height % REDUCTION or width % REDUCTION:
        raise WorkloadError(
            f"{images.name}: images of {height}x{width} pixels, but {config.model.name} takes "
            f"multiples of {REDUCTION}"
        )
    torch.manual_seed(config.training.seed)
    try:
        return VGG16(classes=len(images.classes), width=config.model.width, in_channels=channels)
    except ValueError as error:
        raise WorkloadError(f"model: {error}") from error


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """The torch optimizer that applies the reduced gradient; fused into one kernel where that is asked for."""
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=fused or None,
        )
    adam = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return adam(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,
    )
