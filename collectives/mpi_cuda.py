"""Device arrays over MPI: given to an MPI that moves device memory, or through pinned host memory to any other."""

from __future__ import annotations

from typing import Any

import cupy
from mpi4py import MPI

from collectives.cuda.device import Device, address_of
from collectives.cuda.environment import SEE_ITS_STATE, first_line, gpu_problem
from collectives.device_transport import DeviceTransport
from collectives.mpi import MpiTransport, on_this_host
from collectives.sparse import Array
from collectives.staging import StagedTransport


class CudaMpiTransport(DeviceTransport, MpiTransport):
    """Device arrays over an MPI that moves device memory.

    MPI does not know streams, so the stream is waited for before a message starts, if anything was put on it since the
    last wait.
    """

    def _mpi_buffer(self, array: Array) -> Any:
        self._synchronize()
        return [MPI.buffer.fromaddress(address_of(array), array.nbytes), MPI.BYTE]

    def _synchronize(self) -> None:
        if self.device.pending:
            self.device.synchronize()


class StagedCudaTransport(DeviceTransport, StagedTransport, MpiTransport):
    """Device arrays over an MPI that moves host memory only."""

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        super().__init__(comm, device, device)


def connect_device(host: MpiTransport, device: Device, staged: bool) -> DeviceTransport:
    """The transport for device arrays among the ranks of `host`, which the caller closes; `staged` may differ. Collective."""
    transport = (StagedCudaTransport if staged else CudaMpiTransport)(host.comm, device)
    transport.shared = host.shared
    return transport


def select_device(comm: MPI.Intracomm) -> int:
    """Make a GPU the current one, by this rank's place on its host, round robin; returns its number. Collective.

    Raises:
        RuntimeError: a rank has no usable GPU; on every rank alike. The message names the ranks, the cause and a remedy.
    """
    number, problem = _use_gpu(on_this_host(comm)[0])
    failed = {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    if failed:
        where = "" if len(failed) == comm.size else f" on rank(s) {', '.join(map(str, failed))}"
        raise RuntimeError(f"no GPU can be selected{where}: {next(iter(failed.values()))}")
    return number


def _use_gpu(local_rank: int) -> tuple[int, str]:
    """(the GPU's number, why it cannot be used): a busy or exclusive GPU refuses only when it is made the current one."""
    refusals = cupy.cuda.runtime.CUDARuntimeError
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except refusals as error:
        return 0, gpu_problem() or first_line(error)
    if not count:
        return 0, gpu_problem()
    number = local_rank % count
    try:
        cupy.cuda.Device(number).use()
    except refusals as error:
        return number, f"GPU {number} cannot be used ({first_line(error)}): {SEE_ITS_STATE}"
    return number, ""
