"""What is trained: from a configuration to a network, a rank's batches and its share of the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from data import DataError
from data.images.cifar10 import open_cifar10
from data.images.dataset import Augment, ImageSet
from data.images.digits import load_digits
from data.images.file import open_image_file
from data.images.loader import Batch, EvaluationLoader, EvaluationSource, TrainingLoader, TrainingSource
from jobs.config.config import Config
from jobs.config.sections import DataConfig, OptimizerConfig, TrainingConfig
from jobs.train.captured_optimizer import CapturedOptimizer
from jobs.train.placement import Placement
from jobs.train.uncorrected_adam import UncorrectedAdam
from models.vgg import REDUCTION, VGG16


class WorkloadError(ValueError):
    """Settings and data that are fine by themselves and do not go together."""


Load = Callable[[DataConfig], tuple[ImageSet, ImageSet]]


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


class Workload(Protocol):
    """One rank's side of a training task. Nothing in it communicates.

    Attributes:
        model: holds the parameters.
        network: what a loss is computed with: the model, or what was wrapped around it.
        steps_per_epoch: batches of an epoch.
    """

    model: nn.Module
    network: nn.Module
    steps_per_epoch: int

    def place(self, placement: Placement) -> None:
        """Move network and data to a device. Raises DataError: they do not fit."""
        ...

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch, steps_per_epoch of them, or those from first_step on."""
        ...

    def loss(self, batch: Any) -> torch.Tensor:
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
        config: precision, memory layout and compilation.
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingLoader,
        held_out: EvaluationLoader,
        config: TrainingConfig,
    ) -> None:
        self.model = self.network = model
        self._config = config
        self._format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.steps_per_epoch = training.steps_per_epoch
        self._loaders = training, held_out
        self._training: TrainingSource = training
        self._held_out: EvaluationSource = held_out

    def place(self, placement: Placement) -> None:
        """Move network and data to a device. Raises DataError: they do not fit."""
        training, held_out = self._loaders
        self._training = placement.training_source(training, self._format)
        self._held_out = placement.evaluation_source(held_out, self._format)
        self.model.to(device=placement.device).to(memory_format=self._format)  # type: ignore[call-overload]
        if self._config.compile:
            self.network = torch.compile(self.model, mode=self._config.compile)  # type: ignore[assignment]

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch, or those from first_step on."""
        return self._training.epoch(epoch, first_step)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of a batch."""
        logits = self._logits(self.network, batch)
        return nn.functional.cross_entropy(
            logits.float(), batch[1], label_smoothing=self._config.label_smoothing
        )

    def _logits(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        images = batch[0].contiguous(memory_format=self._format)
        with autocast(self._config.precision, images.device):
            logits: torch.Tensor = network(images)
        return logits

    def score(self) -> Score:
        """Summed cross entropy, and how many of the held-out samples are classed right."""
        samples = 0
        # on the device, so that it is waited for once
        device = next(self.model.parameters()).device
        loss, correct = torch.zeros(2, dtype=torch.float64, device=device)
        self.model.eval()
        try:
            with torch.inference_mode():
                for batch in self._held_out:
                    logits = self._logits(self.model, batch)
                    loss += nn.functional.cross_entropy(logits.float(), batch[1], reduction="sum")
                    correct += (logits.argmax(dim=1) == batch[1]).sum()
                    samples += len(batch[1])
        finally:
            self.model.train()
        return Score(float(loss), int(correct), samples)


def build_workload(config: Config, *, rank: int, size: int, load: Load | None = None) -> Workload:
    """The workload that a configuration describes, as one rank sees it; the weights are equal on all ranks.

    Args:
        config: a run's.
        rank, size: this rank's place.
        load: gives the training and the held-out images, where images are trained on; default: load_images.

    Raises:
        DataError: data that is missing, broken, or too little for the ranks.
        WorkloadError: settings and data that do not go together.
    """
    if config.model.name == "lstm":
        from jobs.train.tasks.speech import build_speech  # which imports this file

        return build_speech(config, rank=rank, size=size)
    if config.model.name == "bert":
        from jobs.train.tasks.text import build_language  # which imports this file

        return build_language(config, rank=rank, size=size)
    training, held_out = (load or load_images)(config.data)
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
    return Classification(build_model(config, training), loader, held_out_loader, config.training)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Within it torch computes in that precision what is safe in it."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def load_images(config: DataConfig) -> tuple[ImageSet, ImageSet]:
    """The training and the held-out images. Raises DataError, and WorkloadError: these are not images."""
    if config.name == "an4":
        raise WorkloadError(f"data.name {config.name!r} takes model.name 'lstm'")
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
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    *,
    fused: bool = False,
    captured: bool = False,
) -> torch.optim.Optimizer:
    """The torch optimizer that applies the reduced gradient.

    Args:
        config: of a run.
        parameters: where they are to stay.
        fused: in one kernel.
        captured: and that replayed as a CUDA graph.
    """
    optimizer = _torch_optimizer(config, parameters, fused, captured)
    return CapturedOptimizer(optimizer) if captured else optimizer


def _torch_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], fused: bool, capturable: bool
) -> torch.optim.Optimizer:
    groups = _groups(config, parameters)
    if config.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            fused=fused or None,
        )
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = kinds[config.name] if config.bias_correction else UncorrectedAdam
    return kind(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,
        capturable=capturable,
    )


def _groups(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    every = list(parameters)
    if config.decay_vectors:
        return [{"params": every}]
    matrices = {"params": [p for p in every if p.ndim > 1]}
    vectors = {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]
