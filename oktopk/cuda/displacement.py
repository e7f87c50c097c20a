"""What parameters on a GPU have moved, as a gradient, and the pass that puts them back where reference and residual say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oktopk.cuda.layouts import DisplacementHead
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.displacement import ParameterDisplacement

if TYPE_CHECKING:
    from collectives.cuda.device import CuArray, Device
    from collectives.cuda.launch import Kernel


class DeviceDisplacement(GradientTensors, ParameterDisplacement):
    """A displacement of parameters on a GPU, a tensor list that steps read.

    Args:
        device, kernels, sizes, element_bytes: as `GradientTensors`, of the parameters; `show` among the kernels.
        reference: float32[n], its memory.
        share: of the residual.
    """

    HEAD = len(bytes(DisplacementHead())) // 8

    def __init__(
        self,
        device: Device,
        kernels: Mapping[str, Kernel],
        sizes: Sequence[int],
        element_bytes: int,
        reference: CuArray,
        share: float,
    ) -> None:
        super().__init__(device, kernels, sizes, element_bytes)
        self._reference = reference  # keeps the memory alive
        self.set_share(share)
        self._factors = device.allocate(len(self._filled), np.float32)
        self._uploaded: list[float] | None = None

    def set_share(self, share: float) -> None:
        head = bytes(DisplacementHead(reference=self._reference.data.ptr, share=share))
        self._device.upload(self.address, np.frombuffer(head, np.uint8))

    def show(self, residual: CuArray, factors: Sequence[float] | None = None) -> None:
        every = 0
        if factors is not None:
            every = self._factors.data.ptr
            if self._uploaded != list(factors):
                self._uploaded = list(factors)
                self._device.upload(every, np.asarray(factors, np.float32)[self._filled])
        if self._chunks:
            self._device.launch(
                self.kernels["show"], self._chunks, 256,
                displacement=self.address, residual=residual.data.ptr, factors=every, n=self.length,
                tensors=len(self._filled),
            )  # fmt: skip
