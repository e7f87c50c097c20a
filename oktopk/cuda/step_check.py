"""What an optimizer's step must know before it begins, in one pass over gradients on a GPU."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oktopk.cuda.layouts import CHUNK
from oktopk.cuda.mailbox import Mailbox
from oktopk.cuda.multi_tensor import GradientTensors

if TYPE_CHECKING:
    from collectives.cuda.device import Device
    from collectives.cuda.launch import Kernel

_BLOCKS = 8
"""A processor: as many as it runs at once."""


class StepCheck(GradientTensors):
    """The sum of the squares of a tensor list, in float64, and whether sampled words of other memory are what they were.

    The sum is NaN or Inf where an element is, and the same bits in each run, on GPUs with as many processors. Squares of some
    elements are added in float32 first, so one of 1.8e19 or more makes the sum Inf, too.

    Args:
        device, kernels, sizes, element_bytes: as `GradientTensors`, of the gradients; `check_step` among the kernels.

    Memory: beside the list's some kilobytes, and 8 bytes a sample.
    Memory traffic: of a check, the elements once.
    """

    def __init__(
        self, device: Device, kernels: Mapping[str, Kernel], sizes: Sequence[int], element_bytes: int
    ) -> None:
        super().__init__(device, kernels, sizes, element_bytes)
        self._blocks = min(max(1, -(-self.length // CHUNK)), _BLOCKS * device.processors)
        self._partial = device.allocate(self._blocks, np.float64)
        self._finished = device.allocate(1, np.uint32)
        device.zero(self._finished.data.ptr, 4)
        # of its own: two checks may be on the stream
        self._mailbox = Mailbox(device, f"check {self.address}", 3)
        self._epoch = 0
        self.set_samples(np.zeros(0, np.uint64))

    def set_samples(self, places: NDArray[np.uint64]) -> None:
        """Set which words are compared from here on, by their addresses; each is as long as an element."""
        self._places, self._samples = self._device.allocate(len(places), np.uint64), len(places)
        if len(places):
            self._device.upload(self._places.data.ptr, places)

    def begin(self, kept: int) -> None:
        """Put a check on the stream.

        Args:
            kept: address of what the samples should hold, one after the other.
        """
        self._epoch = self._device.next_epoch()
        self._device.launch(
            self.kernels["check_step"], self._blocks, 256,
            table=self._table, n=self.length, partial=self._partial.data.ptr, finished=self._finished.data.ptr,
            places=self._places.data.ptr, kept=kept, samples=self._samples, epoch=self._epoch,
            mailbox=self._mailbox.address,
        )  # fmt: skip

    def read(self) -> tuple[float, bool]:
        """The sum of squares, and whether a sample differs, of the last check; waits for it.

        Raises:
            RuntimeError: a kernel failed.
        """
        low, high, differs = self._mailbox.read(self._epoch)
        (square,) = struct.unpack("=d", struct.pack("=II", low, high))
        return square, bool(differs)
