"""The sum of one fixed vector through peer memory; all vectors of a process share the windows."""

from __future__ import annotations

from typing import Any

from collectives.cuda.dense_p2p import DenseP2P
from collectives.cuda.device import Device
from collectives.transport import Transport


class P2PDenseAllreduce:
    """As `collectives.dense_allreduce.DenseAllreduce`, through peer memory: the sum of one fixed vector, in place.

    Those whose transports come from one connection, and whose streams are the same, share one `DenseP2P`: they must run in one
    order on all ranks.

    Args:
        vector: CuPy float32[n] on the GPU of `device`; must not move.
        transport, device, timeout: as `DenseP2P`. Collective: every rank must construct.

    Raises:
        RuntimeError: as `DenseP2P`; on every rank alike.

    Memory: windows, see `DenseP2P`.
    Traffic: `DenseP2P.nbytes_sent`.
    """

    same_everywhere = True

    def __init__(self, vector: Any, transport: Transport, device: Device, timeout: float) -> None:
        self._vector, self._device, self._transport = vector, device, transport
        self._key = "dense", device.id, device.stream.ptr
        if self._key in transport.shared:
            windows, users = transport.shared[self._key]
        else:
            windows, users = DenseP2P(transport, device, timeout, measure=()), 0
        self._windows: DenseP2P = windows
        windows.transport = transport
        self._nonfinite = device.report("dense nonfinite", 1)
        self._algorithm = windows.fastest(vector.nbytes)
        transport.shared[self._key] = windows, users + 1

    def run(self, scale: float = 1.0) -> bool:
        """Sum over the ranks, times `scale`; waits. Collective. Returns whether all sums are finite.

        Raises:
            RuntimeError: as `DenseP2P.check`.
        """
        self._nonfinite[0] = 0
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
            algorithm=self._algorithm,
        )
        self._device.pending = True
        self._windows.check()
        return not self._nonfinite[0]

    def free(self) -> None:
        """Free the windows, if no other vector shares them. Collective."""
        shared = self._transport.shared
        windows, users = shared.pop(self._key)
        windows.transport = self._transport
        if users > 1:
            shared[self._key] = windows, users - 1
        else:
            windows.close()
