"""One shard of the sum of a host's gradients, which kernels add up where they read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from oktopk.cuda.layouts import ShardSum
from oktopk.cuda.multi_tensor import ComposedGradient

if TYPE_CHECKING:
    from collectives.cuda.device import CuArray, Device
    from collectives.cuda.launch import Kernel


class DeviceShardSum(ComposedGradient):
    """The device's `oktopk.cpu.kernels.ShardSum`: gradients lie in windows of all ranks of a host.

    Args:
        device: where kernels run.
        kernels: that read such a gradient, by the names of those that read one vector, and `sum_shard`.
        out: float32[elements of the shard], where `summed` writes.
        layout: the fields of `oktopk.cuda.layouts.ShardSum`.
    """

    def __init__(self, device: Device, kernels: Mapping[str, Kernel], out: CuArray, **layout: int) -> None:
        self.kernels, self._device, self._out = kernels, device, out
        self._sum = bytes(ShardSum(**layout))
        self._table = device.allocate(len(self._sum), np.uint8)
        self.address: int = self._table.data.ptr
        device.upload(self.address, np.frombuffer(self._sum, np.uint8))

    def summed(self) -> CuArray:
        """The sum as one vector."""
        out = self._out
        self._device.launch_for(self.kernels["sum_shard"], out.size, sum=self._sum, out=out.data.ptr)
        return out
