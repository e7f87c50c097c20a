"""What an optimizer's step must know before it begins, in one pass over gradients on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oktopk.cuda.layouts import CHUNK
from oktopk.cuda.multi_tensor import GradientTensors

if TYPE_CHECKING:
    from collectives.cuda.device import Device
    from collectives.cuda.launch import Kernel

_numbers = itertools.count()


class StepCheck(GradientTensors):
    """The sum of the squares of a tensor list, in float64, and whether sampled words of other memory are what they were.

    The sum is NaN or Inf where an element is. It has the same bits in each run, on each GPU and wherever the tensors lie.
    Squares of up to 16 elements are added in float32 first: where one of these sums exceeds float32 the sum is Inf.

    Args:
        device, kernels, sizes, element_bytes: as `GradientTensors`, of the gradients; `check_step` among the kernels.
        samples: how many words are compared, each as long as an element.

    Attributes:
        BLOCKS: of the kernel, at most; the sum depends on it.

    Memory: beside the list's 8 kilobytes, and 8 bytes a sample.
    Memory traffic: of a check, the elements once.
    """

    BLOCKS = 1024

    def __init__(
        self,
        device: Device,
        kernels: Mapping[str, Kernel],
        sizes: Sequence[int],
        element_bytes: int,
        samples: int,
    ) -> None:
        super().__init__(device, kernels, sizes, element_bytes)
        self._blocks = min(max(1, -(-self.length // CHUNK)), self.BLOCKS)
        self._partial = device.allocate(self._blocks, np.float64)
        self._finished = device.allocate(1, np.uint32)
        device.zero(self._finished.data.ptr, 4)
        self._samples, self._places = samples, device.allocate(samples, np.uint64)
        self._report = f"check {next(_numbers)}"
        device.report(self._report, 4)

    def set_samples(self, places: NDArray[np.uint64]) -> None:
        """Set which words are compared from here on, by their addresses.

        Raises:
            ValueError: more or fewer than at construction.
        """
        if len(places) != self._samples:
            raise ValueError(f"{len(places)} places for {self._samples} samples")
        self._device.upload(self._places.data.ptr, places)

    def begin(self, kept: int) -> None:
        """Put a check on the stream.

        Args:
            kept: address of what the samples should hold, one after the other.
        """
        self._device.launch(
            self.kernels["check_step"], self._blocks, 256,
            table=self._table, n=self.length, partial=self._partial.data.ptr, finished=self._finished.data.ptr,
            places=self._places.data.ptr, kept=kept, samples=self._samples,
            report=self._device.address(self._report),
        )  # fmt: skip

    def read(self) -> tuple[float, bool]:
        """The sum of squares, and whether a sample differs, of the last check; waits for the stream."""
        self._device.synchronize()
        square, differs = self._device.report(self._report, 4).view(np.float64).tolist()
        return square, bool(differs)
