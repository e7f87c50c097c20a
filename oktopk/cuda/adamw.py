"""AdamW on a GPU, in the pass that adds what it moves parameters by to the residual and selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oktopk.cuda.layouts import AdamWHead, AdamWTensor
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.displacement import ADAMW_TERMS, AdamWDisplacement

if TYPE_CHECKING:
    from collectives.cuda.device import Device
    from collectives.cuda.launch import Kernel

_TENSOR = np.dtype(AdamWTensor)
_FROM_GRADIENT = ADAMW_TERMS.index("from_gradient")


class DeviceAdamW(GradientTensors, AdamWDisplacement):
    """AdamW's step on parameters on a GPU: the tensor list of their gradients, behind what tells where their moments lie.

    What changes from step to step lies in device memory, so that a captured step can be replayed. Above 1,365 parameters setting
    it may wait for the stream.

    Args:
        device, kernels, sizes, element_bytes: as `GradientTensors`.
    """

    HEAD = len(bytes(AdamWHead())) // 8

    def __init__(
        self, device: Device, kernels: Mapping[str, Kernel], sizes: Sequence[int], element_bytes: int
    ) -> None:
        super().__init__(device, kernels, sizes, element_bytes)
        self._tensors = np.zeros(len(self._filled), _TENSOR)
        # views: a write to each field by itself takes four times as long
        words = self._tensors.view(np.float32).reshape(len(self._filled), -1)
        self._moments, self._terms = words[:, :4].view(np.uint64), words[:, 4 : 4 + len(ADAMW_TERMS)]
        self._place = device.allocate(self._tensors.nbytes, np.uint8)
        head = bytes(AdamWHead(tensors=self._place.data.ptr, count=len(self._tensors)))
        device.upload(self.address, np.frombuffer(head, np.uint8))

    def set_step(self, addresses: NDArray[np.int64], terms: NDArray[np.float32]) -> None:
        self.set_pointers(addresses[0].tolist())
        self._moments[:] = addresses[1:, self._filled].T
        self._terms[:] = terms[self._filled]
        self._tensors["from_gradient"] = terms[self._filled, _FROM_GRADIENT]  # an integer
        self._device.upload(self._place.data.ptr, self._tensors)
