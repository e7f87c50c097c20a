"""Words that kernels post to the host through pinned memory, as plain integers."""

from __future__ import annotations

import ctypes

from collectives.cuda.device import Device


class Mailbox:
    """64-bit words in pinned memory, the epoch above the value, so that each word tells whether it has arrived.

    Args:
        device: whose kernels post.
        name: of the report.
        count: words.

    Attributes:
        address: that kernels post to.
    """

    def __init__(self, device: Device, name: str, count: int) -> None:
        self._device = device
        self._words = device.view(name, ctypes.c_uint64 * count)
        self._count = count
        self.address = ctypes.addressof(self._words)

    def read(self, epoch: int) -> list[int]:
        """The values of that epoch; waits until all have arrived."""
        self._device.watch(self._words, self._count - 1, epoch)
        base = epoch << 32
        while True:
            words = [word - base for word in self._words[:]]
            if min(words) >= 0 and max(words) <= 0xFFFFFFFF:  # else some are of another epoch
                return words
