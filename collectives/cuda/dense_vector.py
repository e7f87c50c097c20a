"""The sum of one fixed vector through peer memory; vectors of one connection, stream and time limit share the windows."""

from __future__ import annotations

import itertools
from typing import Any

from collectives.cuda.dense_algorithms import dense_kernels
from collectives.cuda.dense_p2p import DenseP2P
from collectives.cuda.device import Device
from collectives.transport import Transport

_NUMBERS = itertools.count()
"""Of the windows that vectors share; those of rank 0 count."""


class P2PDenseAllreduce:
    """As `collectives.dense_allreduce.DenseAllreduce`, through peer memory: the sum of one fixed vector, in place.

    Those whose transports come from one connection, and whose streams and time limits are the same, share one `DenseP2P`: they
    must run in one order on all ranks. Where ranks differ in what they could share, or it was aborted, a new one is made.

    Args:
        vector: CuPy float32[n] on the GPU of `device`; must not move.
        transport, device, timeout: as `DenseP2P`. Collective: every rank must construct.

    Raises:
        NoPeerMemoryError, RuntimeError: as `DenseP2P`; on every rank alike.

    Memory: windows, see `DenseP2P`.
    Traffic: `collectives.cuda.dense_algorithms.bytes_sent`.
    """

    on_device = True

    def __init__(self, vector: Any, transport: Transport, device: Device, timeout: float) -> None:
        self._vector, self._device, self._transport = vector, device, transport
        self._key = "dense", device.id, device.stream.ptr, timeout
        windows: DenseP2P | None = transport.shared.get(self._key)
        own_use = None
        with transport.together_or("no dense sums through peer memory", RuntimeError):
            device.report("dense nonfinite", 1)
            dense_kernels("float32", transport.size)
            if windows is not None and not windows.aborted:
                own_use = windows.number, windows.users
        everyone = transport.allgather_objects((own_use, next(_NUMBERS)))
        if windows is None or any(use is None or use != own_use for use, _ in everyone):
            # a device of its own: that of a vector ends with it, the windows with the last vector
            with device.gpu:
                windows = DenseP2P(transport, Device(device.stream), timeout)
            windows.number = everyone[0][1]
            transport.shared[self._key] = windows
        self._windows = windows
        windows.users += 1
        windows.transport = transport

    def run(self, scale: float = 1.0) -> bool:
        """Sum over the ranks, times `scale`; waits. Collective. Returns whether all sums are finite.

        Raises:
            MissingRanksError, RuntimeError: as `DenseP2P.check`.
        """
        nonfinite = self._device.report("dense nonfinite", 1)
        nonfinite[0] = 0
        self._windows.transport = self._transport
        pointer, count = self._vector.data.ptr, self._device.address("dense nonfinite")
        self._windows.enqueue(
            pointer,
            pointer,
            0,
            self._vector.size,
            "float32",
            scale=scale,
            nonfinite=count,
            stream=self._device.stream.ptr,
        )
        self._device.synchronize()
        self._windows.raise_if_aborted()
        return not nonfinite[0]

    def abort(self) -> None:
        """End the waiting of the other ranks' kernels: this rank raises. Not collective; no sum in these windows can follow."""
        self._windows.abort()

    def check(self) -> None:
        """Look for an abort that no sum of this rank has met; waits for its kernels.

        Raises:
            MissingRanksError, RuntimeError: as `DenseP2P.check`.
        """
        self._windows.check()

    def free(self) -> None:
        """Free the windows, if no other vector shares them. Collective."""
        self._windows.users -= 1
        if self._windows.users:
            return
        shared = self._transport.shared
        if shared.get(self._key) is self._windows:
            del shared[self._key]
        self._windows.transport = self._transport
        self._windows.close()
