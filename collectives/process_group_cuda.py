"""Device arrays over a torch process group: by NCCL where each rank has a GPU of its own, else through pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.cuda.device import Device, address_of
from collectives.device_transport import DeviceTransport
from collectives.process_group import Meeting, ProcessGroupTransport, host_name
from collectives.staging import StagedTransport


class StagedGroupTransport(DeviceTransport, StagedTransport, ProcessGroupTransport):
    """Device arrays over gloo."""

    def __init__(self, comm: Meeting, device: Device) -> None:
        super().__init__(comm, device, device)


class NcclMessages:
    """An NCCL communicator of our own, which all transports of some ranks share: theirs take turns in one order on all ranks.

    The process group that was given carries nothing: DistributedDataParallel's operations on it may be at work meanwhile.

    Args:
        whole: all ranks, each with a GPU of its own, the current one. Collective: every rank must construct.

    Attributes:
        users: transports that have not been closed.
    """

    def __init__(self, whole: Meeting, device: Device) -> None:
        self.users = 0
        self._place = torch.device("cuda", device.id)
        store = dist.PrefixStore("nccl", whole.store)
        # beside computation its few blocks come first
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        kind = dist.ProcessGroup.BackendType.NCCL
        self._group: Any = dist.ProcessGroup(store, whole.rank, whole.size)
        self._group._set_default_backend(kind)
        nccl = dist.ProcessGroupNCCL(store, whole.rank, whole.size, options)
        self._group._register_backend(self._place, kind, nccl)
        # NCCL connects the ranks in the first operation of all
        self._group.allreduce([torch.zeros(1, device=self._place)]).wait()

    def exchange(self, operations: Sequence[tuple[str, Tensor, int]], stream: int) -> Any:
        """Start sends and receives as one NCCL operation, after what is on a stream; returns what `wait` takes.

        Args:
            operations: ("send" or "recv", uint8[nbytes] on the GPU, rank), at least one.
            stream: address of the CUDA stream.
        """
        with self._on(stream):
            self._group._start_coalescing(self._place)
            for operation, tensor, rank in operations:
                getattr(self._group, operation)([tensor], rank, 0)
            return self._group._end_coalescing(self._place)

    def wait(self, work: Any, stream: int) -> None:
        """Let a stream wait for an operation; the host does not."""
        with self._on(stream):
            work.wait()

    def _on(self, stream: int) -> torch.cuda.StreamContext:
        # an external stream of address 0 is not the default one: nothing waited for NCCL's there
        known = (
            torch.cuda.ExternalStream(stream, self._place)
            if stream
            else torch.cuda.default_stream(self._place)
        )
        return torch.cuda.stream(known)

    def close(self) -> None:
        """Give the communicator back. Collective."""
        self._group.shutdown()


class _Posted:
    """A request for a message: the operation that it became part of, None before."""

    work: Any = None


class NcclGroupTransport(DeviceTransport, ProcessGroupTransport):
    """Device arrays by NCCL, which runs on a stream of its own; control operations, and lengths of messages, by gloo.

    Counts are on the host when they are sent, and wanted there: by NCCL they would take a copy to the GPU, one back, and a
    wait for the stream more.

    Messages that were posted become one NCCL operation: those of `send_all` with the receives before it, others when a request is
    waited for. Ranks post and wait in one order, so that the ends of a message are in operations that wait for no others.
    """

    library = "nccl"

    def __init__(self, comm: Meeting, device: Device) -> None:
        super().__init__(comm, device)
        self.kernels.sends_wait = False
        whole = comm.whole
        if whole.messages is None:
            whole.messages = NcclMessages(whole, device)
        whole.messages.users += 1
        self._posted: list[tuple[_Posted, tuple[str, Tensor, int]]] = []

    def close(self) -> None:
        whole = self.comm.whole
        whole.messages.users -= 1
        if (
            not whole.messages.users and not whole.gave_up
        ):  # else NCCL would wait for the ranks that did not come
            self.device.synchronize()
            whole.messages.close()
            whole.messages = None
        super().close()

    def send_all(self, messages: Sequence[tuple[Any, int]]) -> list[Any]:
        requests = super().send_all(messages)
        self._launch()
        return requests

    def _finish(self, requests: list[Any]) -> None:
        """Let the stream wait for all messages."""
        self._launch()
        works = [request.work for request in requests if isinstance(request, _Posted)]
        for i, work in enumerate(works):
            if work not in works[:i]:
                self.comm.whole.messages.wait(work, self.device.stream.ptr)
        super()._finish([request for request in requests if not isinstance(request, _Posted)])

    def _post(self, operation: str, array: Any, rank: int) -> _Posted:
        request = _Posted()
        self._posted.append((request, (operation, _tensor(array, self.device.id), self.comm.ranks[rank])))
        return request

    def _launch(self) -> None:
        if self._posted:
            posted, self._posted = self._posted, []
            self.device.pending = True
            operations = [operation for _, operation in posted]
            work = self.comm.whole.messages.exchange(operations, self.device.stream.ptr)
            for request, _ in posted:
                request.work = work


class _Bytes:
    """Device memory as torch takes it without a copy."""

    def __init__(self, array: Any) -> None:
        self.array = array  # keeps the memory
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (address_of(array), False),
            "version": 3,
        }


def _tensor(array: Any, gpu: int) -> Tensor:
    """The bytes of a contiguous array on a GPU, not copied."""
    return torch.as_tensor(_Bytes(array), device=torch.device("cuda", gpu))


def connect_device(host: ProcessGroupTransport, device: Device) -> StagedGroupTransport | NcclGroupTransport:
    """The transport for device arrays among the ranks of `host`, which the caller closes. Collective."""
    gpu = cupy.cuda.runtime.deviceGetPCIBusId(device.id)
    everyone = host.allgather_objects((host_name(), gpu, host.comm.nccl))
    own = len({(name, gpu) for name, gpu, _ in everyone}) == host.size > 1
    by_nccl = own and all(nccl for _, _, nccl in everyone)
    transport = (NcclGroupTransport if by_nccl else StagedGroupTransport)(host.comm, device)
    transport.shared = host.shared
    return transport
