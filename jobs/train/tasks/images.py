"""Image classification: a Workload."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from data.images.digits import load_digits
from data.images.file import ImageSet, open_image_file
from data.images.loader import Augment, Batch, Pixels
from jobs.config.config import Config
from jobs.train.placement import Placement
from jobs.train.tasks.task import Workload, WorkloadError, naming
from models.vgg import REDUCTION, VGG16
from models.vit import ViT


class Classification(Workload[Batch]):
    """Images into classes by cross entropy. The model takes images and returns logits[batch, classes]."""

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self._config.training.channels_last else torch.contiguous_format

    def move_to(self, placement: Placement) -> None:
        super().move_to(placement)
        self.model.to(memory_format=self._format)  # type: ignore[call-overload]

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean cross entropy of a batch."""
        logits = self._logits(self.network, batch)
        smoothing = self._config.training.label_smoothing
        return nn.functional.cross_entropy(logits.float(), batch[1], label_smoothing=smoothing)

    def _logits(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        images, side = batch[0], self._config.data.resize
        if side:
            # here, and not before: large images are held only as long as their batch
            images = nn.functional.interpolate(images, (side, side), mode="bilinear", align_corners=False)
        logits: torch.Tensor = self._run(network, images.contiguous(memory_format=self._format))
        return logits

    def _counts(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
        logits, labels = self._logits(self.model, batch), batch[1]
        loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        return loss, (logits.argmax(dim=1) == labels).sum(), len(labels)


def build_images(config: Config, *, rank: int, size: int) -> Classification:
    """The images, network and batches that a configuration describes, as one rank sees them; the weights are equal on all ranks.

    Args:
        config: a run's.
        rank, size: this rank's place.

    Raises:
        DataError: data that is missing, broken, or too little for the ranks.
        WorkloadError: settings and data that do not go together.
    """
    if config.data.name == "digits":
        training, held_out = load_digits(size=config.data.size, held_out=config.data.held_out)
    else:
        training, held_out = open_image_file(config.data.path)
    augment = Augment(config.data.crop, config.data.flip) if config.data.crop or config.data.flip else None
    with naming("data"):
        pixels = Pixels(training, augment)
    make = partial(make_network, config, training)
    return Classification(make, pixels, Pixels(held_out), config, rank=rank, size=size)


def make_network(config: Config, images: ImageSet) -> nn.Module:
    """The network for these images. Raises ValueError: it does not take such images."""
    channels, height, width = images.shape
    if config.data.resize:
        height = width = config.data.resize
    sides = f"{images.name}: images of {height}x{width} pixels, but {config.model.name} takes"
    if config.model.name == "vit":
        if height != width:
            raise WorkloadError(f"{sides} squares: set data.resize")
        return ViT(
            len(images.classes),
            layers=config.model.layers,
            hidden=config.model.hidden,
            patch=config.model.patch,
            image=height,
            in_channels=channels,
        )
    if height % REDUCTION or width % REDUCTION:
        raise WorkloadError(f"{sides} multiples of {REDUCTION}")
    return VGG16(classes=len(images.classes), width=config.model.width, in_channels=channels)
