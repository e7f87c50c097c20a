"""CuPy arrays and raw kernels on one GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import CuArray, Device
from collectives.cuda.kernels import DeviceKernels as CollectiveKernels
from collectives.cuda.launch import stream_of_priority
from collectives.cuda.ucx import device_memory_problem
from collectives.element_types import ELEMENT_TYPES
from collectives.entry_windows import DeviceEntryWindows
from collectives.symmetric_memory import SymmetricMemory, aligned, symmetric_memory_problem
from collectives.transport import Transport
from oktopk.backend import Backend, SharedGradients, Stream
from oktopk.cuda.kernels import DeviceKernels
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.cuda.p2p_launches import P2PLaunches, compile_p2p_kernels
from oktopk.cuda.shard_sum import DeviceShardSum
from oktopk.displacement import Displacement
from oktopk.levels import Layout
from oktopk.settings import Settings
from oktopk.step import Gradient


class DeviceBackend(Backend):
    """A GPU and a stream.

    Args:
        gradient_type: "float32", "bfloat16" (given as its bits, uint16) or "float16".
        stream: the cupy stream that gradients are produced on; None: the current one.

    Raises:
        MemoryError: the GPU's memory does not suffice.
        Exception: a kernel does not compile for the GPU: whatever CuPy raises.
    """

    def __init__(self, gradient_type: str, stream: Stream | None = None) -> None:
        self.device = Device(stream)
        self.stream = self.device.stream
        nvtx = getattr(cupy.cuda, "nvtx", None)  # CuPy may be built without
        self.nvtx = nvtx if getattr(nvtx, "available", True) else None
        self.kernels = DeviceKernels(self.device, gradient_type)
        # compiled before ranks wait for each other
        CollectiveKernels(self.device).collect_kernels()
        compile_p2p_kernels()
        self._gradient_type = gradient_type
        self._stored = ELEMENT_TYPES[gradient_type].dtype

    def connect(self, host: Any) -> Transport:
        """As the host's; warns on rank 0 where an MPI does not move device memory, which is staged through the host then."""
        if host.library != "MPI":
            from collectives import process_group_cuda

            return process_group_cuda.connect_device(host, self.device)
        from collectives.mpi_cuda import connect_device

        problem = device_memory_problem() if host.size > 1 else ""
        staged = {rank: text for rank, text in enumerate(host.allgather_objects(problem)) if text}
        if staged and host.rank == 0:
            where = "" if len(staged) == host.size else f" on rank(s) {', '.join(map(str, staged))}"
            warnings.warn(
                f"MPI does not move device memory{where}, so messages are staged through pinned host memory, which is slower: "
                f"{next(iter(staged.values()))}. `oktopk-doctor` says what this host can do",
                stacklevel=3,
            )
        return connect_device(host, self.device, staged=bool(problem))

    def zeros(self, length: int) -> CuArray:
        array = self.device.allocate(length, np.float32)
        with self.device.stream:
            array.fill(0)
        return array

    def sparse_update(self, vector: CuArray) -> None:
        return None

    def validate(self, gradient: Gradient, length: int) -> Gradient:
        if isinstance(gradient, GradientTensors | Displacement):
            if gradient.length != length:
                raise ValueError(f"tensor list of {gradient.length} elements is not of {length}")
            return gradient
        if not isinstance(gradient, cupy.ndarray):
            raise TypeError(
                f"gradient is a {type(gradient).__name__}, not a cupy array on GPU {self.device.id}: "
                "cupy.asarray(gradient) copies it there, cupy.from_dlpack(tensor) shares a CUDA tensor's memory"
            )
        stored = self._stored
        if gradient.dtype != stored:
            raise TypeError(
                f"gradient dtype {gradient.dtype} is not {stored}, which holds {self._gradient_type}"
            )
        if gradient.shape != (length,):
            raise ValueError(f"gradient shape {gradient.shape} is not ({length},)")
        if not gradient.flags.c_contiguous:
            raise ValueError("gradient is not contiguous: pass cupy.ascontiguousarray(gradient)")
        if gradient.data.device_id != self.device.id:
            raise ValueError(
                f"gradient is on GPU {gradient.device.id}, not on GPU {self.device.id}, the current one at construction: "
                f"call cupy.cuda.Device({gradient.device.id}).use() before that"
            )
        return gradient

    def stream_scope(self) -> AbstractContextManager[object]:
        if cupy.cuda.runtime.getDevice() == self.device.id:
            return self.device.stream
        return self._other_gpu_scope()

    @contextmanager
    def _other_gpu_scope(self) -> Iterator[None]:
        """The same where the caller has made another GPU the current one."""
        with self.device.gpu, self.device.stream:
            yield

    def to_host(self, array: CuArray) -> NDArray[np.float32]:
        return np.asarray(array.get(stream=self.device.stream))

    def copy_from_host(self, target: CuArray, array: NDArray[np.float32]) -> None:
        target.set(np.ascontiguousarray(array, np.float32), stream=self.device.stream)

    def read_only(self, array: CuArray) -> CuArray:
        return array

    def share_memory(self, one: CuArray | GradientTensors | Displacement, other: CuArray) -> bool:
        if isinstance(one, GradientTensors | Displacement):
            return False
        begin, others = one.data.ptr, other.data.ptr
        return begin < others + other.nbytes and others < begin + one.nbytes

    def indices(self, entries: Any) -> NDArray[np.int32]:
        return np.asarray(entries.get()["index"])

    def p2p_launches(
        self, transport: Any, length: int, settings: Settings
    ) -> Callable[[int], P2PLaunches] | None:
        return partial(P2PLaunches, self.kernels, transport, length, settings) if transport.p2p else None

    def shared_gradients(
        self, transport: Transport, length: int, shard: int, peer_memory: bool | None
    ) -> SharedGradients:
        problem = "peer memory is not wanted"
        if peer_memory is not False:
            problem = symmetric_memory_problem(transport, shared_gpus=bool(peer_memory))
        if problem:
            raise RuntimeError(f"the ranks of a host cannot read each other's gradients: {problem}")
        return DeviceSharedGradients(transport, self.kernels, length, shard, self._stored)

    def entry_windows(self, transport: Transport) -> DeviceEntryWindows | None:
        return DeviceEntryWindows(transport, self.device) if transport.size > 1 else None

    def stream_beside(self, number: int) -> Stream:
        with self.device.gpu:
            return _stream_beside(self.device.id, self.device.priority, number)

    def follow(self, other: Backend) -> None:
        with self.device.gpu:  # in a new thread the first GPU is the current one, of which the event would be
            event = cupy.cuda.Event(disable_timing=True)
            event.record(other.stream)
            self.device.stream.wait_event(event)

    def wait(self) -> None:
        self.device.synchronize()


@cache  # a stream lives as long as the process
def _stream_beside(gpu: int, priority: int, number: int) -> Stream:
    return stream_of_priority(priority)


class DeviceSharedGradients(SharedGradients):
    """A gradient and a shard of every rank of a host in its symmetric memory, which kernels of all of them read.

    Args:
        transport: among the ranks of the host. Collective: every rank must construct.
        kernels: of the gradients' type.
        length: elements of the gradient (n).
        shard: elements of the longest shard.
        stored: type of its elements.

    Raises:
        RuntimeError: a window cannot be allocated or mapped; on every rank of the host alike.
    """

    def __init__(
        self, transport: Any, kernels: DeviceKernels, length: int, shard: int, stored: np.dtype[Any]
    ) -> None:
        self._kernels, self._size = kernels, transport.size
        _ = kernels.shard_sum_kernels  # compiled before ranks wait for each other
        self._behind = aligned(length * stored.itemsize)
        nbytes = self._behind + shard * np.dtype(np.float32).itemsize
        self._memory = SymmetricMemory(transport, kernels.device, nbytes)
        self.own: CuArray = self._memory.array(length, stored)

    def publish(self, gradient: CuArray) -> None:
        device = self._kernels.device
        if gradient.data.ptr != self.own.data.ptr:
            with device.stream:
                self.own[:] = gradient
        # MPI knows no streams, and a barrier follows: after it the others read this gradient, and may overwrite the entries that
        # this rank was copying from their windows
        device.synchronize()

    def shard_of(self, rank: int, length: int) -> CuArray:
        return self._memory.array_of(rank, length, np.float32, self._behind)

    def sum_of_shard(self, layout: Layout, shard: int, out: CuArray) -> DeviceShardSum:
        kernels, memory = self._kernels, self._memory
        return DeviceShardSum(
            kernels.device, kernels.shard_sum_kernels, out, windows=memory.windows, first=memory.first, ranks=self._size,
            block=layout.block, shards=layout.shards, shard=shard,
        )  # fmt: skip

    def close(self) -> None:
        self._memory.close()
