"""Batches of images cut on a device: the same bytes as data.images.loader's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from data import DataError
from data.batches import BlockLoader
from data.images.loader import Batch, EvaluationLoader, TrainingLoader
from data.sharding import AUGMENTATION

BLOCK = 4096
"""Samples that are cut and augmented together: their launches are shared by all the batches among them."""


class ResidentTrainingLoader(BlockLoader[Batch]):
    """The batches of a TrainingLoader, out of a device's memory.

    The whole split is there as uint8, padded by the crop. A block of batches is gathered in one go, each pixel from where its
    sample's random number says. The next epoch's order is drawn in a thread while the device works on this one.

    Args:
        loader: says what a batch is; a function of (seed, epoch, step, rank).
        device: where the batches are to be.
        memory_format: of the batches.

    Raises:
        DataError: the split does not fit there.
    """

    def __init__(
        self,
        loader: TrainingLoader,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(loader.shards, AUGMENTATION, BLOCK)
        self._augment = loader.augment
        self._device = device
        self._format = memory_format
        crop = loader.augment.crop if loader.augment else 0
        height, width = loader.images.shape[1:]
        self._images = on_device(loader.images.images, device, crop)
        self._labels = torch.from_numpy(loader.images.labels).to(device)
        self._scale, self._shift = (each.to(device) for each in loader.images.standardisation())
        self._channels = torch.arange(loader.images.shape[0], device=device)[:, None, None]
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)
        self._drawing: tuple[int, Future[NDArray[np.int64]]] | None = None
        self._thread = ThreadPoolExecutor(1, "next epoch")

    def batch(self, epoch: int, step: int) -> Batch:
        """As TrainingLoader.batch, on the device; pieces of a larger block, not to be changed."""
        images, labels = self._pieces(epoch, step)
        return images, labels

    def _plan(self, epoch: int) -> torch.Tensor:
        """int64[4, samples] on the device: sample, top, left and mirrored of each, in this rank's order of the epoch."""
        host = torch.from_numpy(self._next_plan(epoch))
        if self._device.type == "cuda":  # from pageable memory the copy would wait for the device
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def _next_plan(self, epoch: int) -> NDArray[np.int64]:
        """The plan on the host; the one after it is begun."""
        drawing = self._drawing
        # one at a time: it uses the cache of draws
        plan = drawing[1].result() if drawing is not None else None
        if plan is None or drawing is None or drawing[0] != epoch:
            plan = self._draw(epoch)
        self._drawing = (epoch + 1, self._thread.submit(self._draw, epoch + 1))
        return plan

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        samples, augment = self.shards.all_indices(epoch), self._augment
        plan = np.zeros((4, len(samples)), np.int64)
        plan[0] = samples
        if augment is not None:
            plan[1:] = augment.places(self.draws(epoch)[samples])
        return plan

    def _cut(self, plan: torch.Tensor) -> Batch:
        samples, top, left, mirrored = plan
        columns = torch.where(mirrored[:, None] > 0, self._columns.flip(0), self._columns)
        pixels = self._images[
            samples[:, None, None, None],
            self._channels,
            (top[:, None] + self._rows)[:, None, :, None],
            (left[:, None] + columns)[:, None, None, :],
        ]
        images = pixels.to(torch.float32, memory_format=self._format).mul_(self._scale).add_(self._shift)
        return images, self._labels[samples]


class ResidentEvaluationLoader:
    """The batches of an EvaluationLoader, out of a device's memory; this rank's samples alone are there.

    Args, Raises: as ResidentTrainingLoader.
    """

    def __init__(
        self,
        loader: EvaluationLoader,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        shard = slice(loader.shard.start, loader.shard.stop)
        self.batch_size = loader.batch_size
        self._format = memory_format
        self._images = on_device(loader.images.images[shard], device, 0)
        self._labels = torch.from_numpy(loader.images.labels[shard]).to(device)
        self._scale, self._shift = (each.to(device) for each in loader.images.standardisation())

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self._labels), self.batch_size):
            here = slice(start, start + self.batch_size)
            images = self._images[here].to(torch.float32, memory_format=self._format)
            yield images.mul_(self._scale).add_(self._shift), self._labels[here]


def on_device(images: NDArray[np.uint8], device: torch.device, padding: int) -> torch.Tensor:
    """uint8[N, C, H + 2 padding, W + 2 padding] on a device, black around the images.

    Raises:
        DataError: they do not fit.
    """
    count, channels, height, width = images.shape
    shape = (count, channels, height + 2 * padding, width + 2 * padding)
    try:
        padded = torch.zeros(shape, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        nbytes = float(np.prod(shape, dtype=np.float64))
        raise DataError(f"{count} images of {nbytes / 1e9:.1f} GB do not fit on {device}: {error}") from error
    # in pieces: a memory map is read once, and never copied as a whole
    for start in range(0, count, BLOCK):
        piece = torch.from_numpy(np.array(images[start : start + BLOCK]))
        padded[start : start + BLOCK, :, padding : padding + height, padding : padding + width] = piece
    return padded
