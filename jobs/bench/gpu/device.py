"""GPU implementation of the bench's device: gradients, and facts about GPU and driver."""

from __future__ import annotations

import gc
import os
import socket
import sys
import zlib
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from collectives.cuda.environment import driver_version
from collectives.cuda.launch import compiled
from collectives.mpi_cuda import select_device
from jobs.bench.device import Device, GradientSource
from jobs.run.provenance import versions

STORED: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""Gradient type -> what CuPy holds it in; bfloat16 as its bits."""

_KERNELS = Path(__file__).parent / "gradients.cu"
_THREADS = 256


class DeviceGradients(GradientSource):
    """Gradients in device memory. Memory: n words for the gradient, 4 MB for the pool."""

    def __init__(self, name: str, length: int, rank: int, seed: int) -> None:
        super().__init__(name, length, rank, seed)
        self._vector = cupy.zeros(length, np.float32)
        self._pool = cupy.asarray(self.pool)
        self._weights = cupy.asarray(self.common_weights), cupy.asarray(self.own_weights)
        self._advance = compiled(_KERNELS).get_function("advance")

    def next(self) -> Any:
        """cupy float32[n]; put on the current stream, not waited for."""
        common, own = (cupy.asarray(starts.astype(np.int32)) for starts in self.starts())
        length, memory = np.int64(self.length), np.float32(self.memory)
        common_weights, own_weights = self._weights
        arguments = (self._vector, length, self._pool, memory, common_weights, common, own_weights, own)
        self._advance((len(common),), (_THREADS,), arguments)
        return self._vector


def convert(source: Any, out: Any) -> None:
    """Round cupy float32[n] into an array of one of STORED. Put on the current stream, not waited for."""
    if out.dtype != np.uint16:
        cupy.copyto(out, source, casting="unsafe")
        return
    kernel = compiled(_KERNELS).get_function("narrow_bfloat16")
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    blocks = min(-(-len(source) // _THREADS), 16 * processors)
    kernel((blocks,), (_THREADS,), (source, out, np.int64(len(source))))


_DIGEST_BLOCK = 4096


def open_cuda(gradient_type: str, comm: MPI.Intracomm) -> Cuda:
    """Take the GPU of this rank's place on its host. Collective."""
    number = select_device(comm)
    gpu = socket.gethostname(), cupy.cuda.runtime.deviceGetPCIBusId(number)
    return Cuda(gradient_type, sharers=comm.allgather(gpu).count(gpu))


class Cuda(Device):
    """The current GPU, on the current stream.

    Args:
        gradient_type: what gradients are placed as, one of STORED.
        sharers: ranks on this GPU.
    """

    name = "cuda"
    asynchronous = True

    def __init__(self, gradient_type: str = "float32", sharers: int = 1) -> None:
        super().__init__(sharers)
        self.gradient_type = gradient_type
        self._placed: Any = None

    def source(self, name: str, length: int, rank: int, seed: int) -> GradientSource:
        return DeviceGradients(name, length, rank, seed)

    def to_device(self, gradient: Any) -> Any:
        """Float32 as it is, or a copy of it rounded to the gradient type; valid until the next call."""
        on_device = cupy.asarray(gradient)
        if self.gradient_type == "float32":
            return on_device
        if self._placed is None or self._placed.shape != on_device.shape:
            self._placed = cupy.empty(on_device.shape, STORED[self.gradient_type])
        convert(on_device, self._placed)
        return self._placed

    def digest(self, update: Any) -> int:
        """A checksum of sums along and across blocks, taken on the GPU: a copy of all of it would take longer than the steps."""
        words = update.view(np.uint32 if update.itemsize == 4 else np.uint16)
        whole = len(words) - len(words) % _DIGEST_BLOCK
        blocks = words[:whole].reshape(-1, _DIGEST_BLOCK)
        parts = [blocks.sum(axis, dtype=np.uint64) for axis in (0, 1)] if whole else []
        checksum = 0
        for part in [*parts, words[whole:]]:
            checksum = zlib.crc32(cupy.asnumpy(part).tobytes(), checksum)
        return checksum

    def finish(self) -> None:
        """Wait for all streams, so for NCCL's too."""
        cupy.cuda.runtime.deviceSynchronize()

    def release(self) -> None:
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


UCX = ("libucx-cu13", "libucx-cu12")
_TUNING = ("CUDA_", "OKTOPK_", "CUPY_", "TORCH_NCCL_")


def gpu_facts() -> dict[str, Any]:
    """Plain values about the current GPU, which stands for all of its host; None where something does not tell."""
    runtime = cupy.cuda.runtime
    current = cupy.cuda.Device()
    properties = runtime.getDeviceProperties(current.id)
    torch: Any = sys.modules.get("torch")
    sees_gpu = torch is not None and torch.cuda.is_available()
    return {
        "name": properties["name"].decode(),
        "count": runtime.getDeviceCount(),
        "driver": driver_version(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "ucx": next((version for name, version in versions(UCX).items() if name in UCX), None),
        "torch_cuda": torch.version.cuda if sees_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if sees_gpu else None,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_TUNING)
        },
    }
