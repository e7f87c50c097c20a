"""Device arrays over any library, and whether the ranks' kernels may read each other's memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from collectives.cuda.dense_vector import P2PDenseAllreduce
from collectives.cuda.device import Device, DeviceWorkspace
from collectives.cuda.kernels import DeviceKernels
from collectives.cuda.layouts import MOST_DENSE_RANKS
from collectives.errors import NoPeerMemoryError
from collectives.host_transport import HostTransport
from collectives.sparse import Vector
from collectives.symmetric_memory import SymmetricMemory, symmetric_memory_problem


class DeviceTransport(HostTransport):
    """What transports of device arrays share; mixed into the transport of a library.

    Args:
        comm: as the library's transport. Collective.
        device: the GPU and stream of this instance.
        more: further arguments of the transport that this class is mixed into.
    """

    kernels: DeviceKernels
    workspace: DeviceWorkspace

    def __init__(self, comm: Any, device: Device, *more: object) -> None:
        library: Any = super()
        library.__init__(comm, *more)
        self.device = device
        self.workspace = DeviceWorkspace(device)
        self.kernels = DeviceKernels(device)

    def dense_allreduce(self, vector: Vector, timeout: float) -> Any:
        self.dense_problem = ""
        if self.p2p and 1 < self.size <= MOST_DENSE_RANKS:
            try:
                return P2PDenseAllreduce(vector, self, self.device, timeout)
            except NoPeerMemoryError as error:  # on every rank alike: most often there is no room for windows
                self.dense_problem = str(error)
                if self.rank == 0:
                    warnings.warn(f"dense sums go by messages: {error}", stacklevel=2)
        return super().dense_allreduce(vector, timeout)

    def allocate(self, length: int) -> Vector:
        return self.device.allocate(length, np.float32)

    def _like_this(self, comm: Any) -> HostTransport:
        return type(self)(comm, self.device)

    def open_p2p(self, wanted: bool | None) -> str:
        if wanted is False:
            return "peer memory is not wanted"
        key = "peer memory", bool(wanted)
        if key not in self.shared:
            self.shared[key] = self._p2p_problem(shared_gpus=bool(wanted))
        self.p2p = not self.shared[key]
        return str(self.shared[key])

    def _p2p_problem(self, shared_gpus: bool) -> str:
        """Why the ranks cannot read each other's memory; "" if they can. Collective."""
        problem = symmetric_memory_problem(self, shared_gpus=shared_gpus)
        if not problem:
            try:  # only an attempt shows it: containers and hidden GPUs have no CUDA IPC
                SymmetricMemory(self, self.device, 0).close()
            except RuntimeError as error:
                problem = str(error)
        # closing the trial may fail on one rank alone
        problems = [text for text in self.allgather_objects(problem) if text]
        return problems[0] if problems else ""
