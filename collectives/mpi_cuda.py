"""The doors from device arrays to MPI: one for an MPI that moves device memory, one for any other."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cuda.device import Device, DeviceEntries, DeviceWorkspace
from collectives.cuda.environment import SEE_ITS_STATE, first_line, gpu_problem, pinned_memory
from collectives.cuda.kernels import DeviceKernels
from collectives.mpi import Transport
from collectives.mpi_staged import StagingTransport
from collectives.symmetric_memory import SymmetricMemory, symmetric_memory_problem
from collectives.traffic import Traffic


class DeviceTransport(Transport):
    """Device arrays over an MPI that moves device memory.

    MPI knows no streams: before a send or a receive everything on the stream must have finished. It is waited for here, and
    only if something was put on it since it was last waited for.

    Args:
        comm: as `Transport`. Collective.
        device: the GPU and stream of this instance.
    """

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        super().__init__(comm)
        self.device = device
        self.workspace = DeviceWorkspace(device)  # type: ignore[assignment]
        self.kernels = DeviceKernels(device)  # type: ignore[assignment]

    def open_p2p(self, wanted: bool | None) -> str:
        return _open_p2p(self, self.device, wanted)

    def allocate(self, length: int) -> Any:
        return self.device.allocate(length, np.float32)

    def send(self, array: Any, dest: int, even_if_empty: bool = False) -> list[MPI.Request]:
        self._settle()
        return super().send(array, dest, even_if_empty)

    def receive(self, array: Any, source: int) -> list[MPI.Request]:
        self._settle()
        return super().receive(array, source)

    def receive_counted(self, array: Any, source: int) -> int:
        self._settle()
        return super().receive_counted(array, source)

    def _starting(self) -> Traffic:
        self._settle()
        return self.traffic

    def _settle(self) -> None:
        if self.device.pending:
            self.device.synchronize()

    def _wire(self, array: Any) -> Any:
        return [MPI.buffer.fromaddress(_address(array), array.nbytes), MPI.BYTE]


class PinnedCopies:
    """Copies between a device and page-locked memory, on the device's stream; see `staging_transport.Copies`."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def pending(self) -> bool:
        """As the protocol says."""
        return self._device.pending

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """As the protocol says."""
        return np.frombuffer(pinned_memory(nbytes), np.uint8, nbytes)

    def copy_out(self, host: NDArray[np.uint8], array: Any) -> None:
        """As the protocol says."""
        self._copy(host.ctypes.data, _address(array), len(host), cupy.cuda.runtime.memcpyDeviceToHost)

    def copy_in(self, array: Any, host: NDArray[np.uint8]) -> None:
        """As the protocol says."""
        self._copy(_address(array), host.ctypes.data, len(host), cupy.cuda.runtime.memcpyHostToDevice)

    def synchronize(self) -> None:
        """As the protocol says."""
        self._device.synchronize()

    def _copy(self, dest: int, source: int, nbytes: int, kind: int) -> None:
        self._device.pending = True
        cupy.cuda.runtime.memcpyAsync(dest, source, nbytes, kind, self._device.stream.ptr)


class StagedDeviceTransport(StagingTransport):
    """Device arrays over an MPI that moves host memory only.

    Args:
        comm: as `Transport`. Collective.
        device: the GPU and stream of this instance.
    """

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        super().__init__(comm, PinnedCopies(device))
        self.device = device
        self.workspace = DeviceWorkspace(device)  # type: ignore[assignment]
        self.kernels = DeviceKernels(device)  # type: ignore[assignment]

    def open_p2p(self, wanted: bool | None) -> str:
        return _open_p2p(self, self.device, wanted)

    def allocate(self, length: int) -> Any:
        return self.device.allocate(length, np.float32)


def _open_p2p(transport: Transport, device: Device, wanted: bool | None) -> str:
    """As `Transport.open_p2p`: peer memory needs no MPI that knows of devices."""
    if wanted is False:
        return "peer memory is not wanted"
    problem = symmetric_memory_problem(transport.comm, shared_gpus=bool(wanted))
    if not problem:
        try:  # what cannot be told beforehand: containers and hidden GPUs have no CUDA IPC
            SymmetricMemory(transport.comm, device, 0).close()
        except RuntimeError as error:
            problem = str(error)
    transport.p2p = not problem
    return problem


def _address(array: Any) -> int:
    return int(array.pointer if isinstance(array, DeviceEntries) else array.data.ptr)


def local_rank(comm: MPI.Intracomm) -> int:
    """Place of this rank among those of its host. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return int(host.Get_rank())
    finally:
        host.Free()


def select_device(comm: MPI.Intracomm) -> int:
    """Make the GPU of this rank's place on its host the current one, round robin; returns its number. Collective.

    Raises:
        RuntimeError: a rank has none that can be used; on every rank alike. The message names the ranks, and says why and what
            to do.
    """
    number, problem = _use_gpu(local_rank(comm))
    failed = {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    if failed:
        where = "" if len(failed) == comm.size else f" on rank(s) {', '.join(map(str, failed))}"
        raise RuntimeError(f"no GPU can be selected{where}: {next(iter(failed.values()))}")
    return number


def _use_gpu(place: int) -> tuple[int, str]:
    """(its number, why it cannot be used): a busy or exclusive GPU refuses only when it is made the current one."""
    refusals = cupy.cuda.runtime.CUDARuntimeError
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except refusals as error:
        return 0, gpu_problem() or first_line(error)
    if not count:
        return 0, gpu_problem()
    number = place % count
    try:
        cupy.cuda.Device(number).use()
    except refusals as error:
        return number, f"GPU {number} cannot be used ({first_line(error)}): {SEE_ITS_STATE}"
    return number, ""
