"""Measures a GPU's copy and link bandwidth, and the fused select kernel, by events on all ranks at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from collectives.cuda.device import Device, DeviceWorkspace
from collectives.cuda.ucx import device_memory_problem
from jobs.bench.document import BenchError
from jobs.bench.floors import ENTRY_BYTES, Speeds, best_seconds, message_seconds, ring_exchange
from jobs.bench.gpu.gradients import STORED, DeviceGradients, convert
from oktopk.cuda.kernels import DeviceKernels
from oktopk.settings import entries_kept

_WIRE_BYTES = 64 << 20
_WIRE_REPEATS = 4
_COPY_BYTES = 512 << 20
_TRIES = 11
_SETTLED = 3
"""Gradients accumulated before the kernel is timed: in a step it never sees a gradient alone."""


class Timer:
    """Device seconds of work on the current stream, without the host's part in them.

    Before each try 512 MB are filled: what the caches held is gone, and the host gets ahead of the device.
    """

    def __init__(self) -> None:
        self._flush = cupy.empty(512 << 20, np.uint8)

    def seconds(
        self, comm: MPI.Intracomm, work: Callable[[], object], prepare: Callable[[], object] = lambda: None
    ) -> float:
        """The median of some tries, on the slowest rank. Collective; the work must not communicate."""
        spent = []
        for attempt in range(_TRIES + 1):
            prepare()
            comm.Barrier()
            self._flush.fill(attempt)
            began = cupy.cuda.Event()
            began.record()
            ended = work()
            if not isinstance(ended, cupy.cuda.Event):
                ended = cupy.cuda.Event()
                ended.record()
            ended.synchronize()
            spent.append(cupy.cuda.get_elapsed_time(began, ended) / 1e3)
        return float(comm.allreduce(statistics.median(spent[1:]), MPI.MAX))


def copy_bandwidth(comm: MPI.Intracomm, timer: Timer) -> float:
    """Bytes per second, read and written together, of a device-to-device copy of 512 MB. Collective."""
    source = cupy.zeros(_COPY_BYTES, np.uint8)
    dest = cupy.empty_like(source)
    copy = dest.data.copy_from_device_async
    stream = cupy.cuda.get_current_stream()
    return 2 * _COPY_BYTES / timer.seconds(comm, lambda: copy(source.data, _COPY_BYTES, stream))


def measure_device_speeds(comm: MPI.Intracomm, length: int) -> Speeds:
    """Copy bandwidth; the bandwidth of a ring of 64 MB messages between GPUs; the latency of one through host memory. Collective.

    A small message between GPUs takes MPI longer than one through host memory, and writing into a peer's memory need not: the
    floor is the lower one. Takes 1.7 GB while it runs.
    """
    memory = copy_bandwidth(comm, Timer())
    if comm.size == 1:
        return Speeds(memory, math.inf, 0.0)
    if device_memory_problem():
        long = ring_exchange(comm, np.zeros(_WIRE_BYTES, np.uint8), np.empty(_WIRE_BYTES, np.uint8))
    else:
        device = Device()  # its memory is what the library sends from
        buffers = [device.allocate(_WIRE_BYTES, np.uint8) for _ in range(2)]
        buffers[0].fill(0)
        device.synchronize()
        long = ring_exchange(comm, *([_raw(buffer), MPI.BYTE] for buffer in buffers))
    wire = best_seconds(comm, 3, lambda: [long() for _ in range(_WIRE_REPEATS)]) / _WIRE_REPEATS
    return Speeds(memory, _WIRE_BYTES / wire, message_seconds(comm))


def _raw(array: Any) -> MPI.buffer:
    return MPI.buffer.fromaddress(array.data.ptr, array.nbytes)


class _MarkedDevice(Device):
    """Marks where the kernels end, before the host waits for them."""

    ended: Any = None

    def synchronize(self) -> None:
        self.ended = cupy.cuda.Event()
        self.ended.record(self.stream)
        super().synchronize()


def select_record(
    comm: MPI.Intracomm, length: int, density: float, gradient_type: str, copy: float
) -> dict[str, Any]:
    """Time the fused accumulate-select-pack kernel alone, and torch.topk beside it. Collective.

    Args:
        copy: bytes per second of a copy, the ceiling.

    Returns:
        nnz; seconds, bytes that must be moved, and share of the copy's bandwidth; topk_seconds, None without torch on GPUs.

    Raises:
        BenchError: the kernel packed other than a comparison finds; on every rank alike.

    Memory: 5n words, and what torch.topk takes.
    """
    timer = Timer()
    accumulated, nnz, seconds = _select_seconds(comm, timer, length, density, gradient_type)
    width = np.dtype(STORED[gradient_type]).itemsize
    moved = (8 + width) * length + ENTRY_BYTES * nnz
    return {
        "nnz": nnz,
        "seconds": seconds,
        "bytes": moved,
        "share": moved / seconds / copy,
        "topk_seconds": _topk_seconds(comm, timer, accumulated, entries_kept(density, length)),
    }


def _select_seconds(
    comm: MPI.Intracomm, timer: Timer, length: int, density: float, gradient_type: str
) -> tuple[Any, int, float]:
    """The accumulated vector, how many of it reach the k-th magnitude, and the time of the pass that finds them."""
    k = entries_kept(density, length)
    source = DeviceGradients("heavy", length, comm.rank, seed=2)
    before = cupy.zeros(length, np.float32)
    for _ in range(_SETTLED):
        before += source.next()
    gradient = cupy.empty(length, STORED[gradient_type])
    convert(source.next(), gradient)
    device = _MarkedDevice()
    kernels = DeviceKernels(device, gradient_type)
    entries = DeviceWorkspace(device).entries("bench", 2 * k)
    accumulated = cupy.empty_like(before)
    kernels.accumulate(gradient, before, accumulated)
    threshold = cupy.asnumpy(cupy.partition(cupy.abs(accumulated), length - k)[length - k :][:1])[0]
    bits = int(threshold.view(np.uint32))
    wanted = int((cupy.abs(accumulated) >= threshold).sum())
    packed: set[int] = set()

    def select() -> Any:
        device.ended = None
        packed.add(kernels.accumulate_select(gradient, accumulated, bits, entries).nnz)
        return device.ended

    seconds = timer.seconds(comm, select, lambda: cupy.copyto(accumulated, before))
    if not comm.allreduce(packed == {wanted}, MPI.LAND):
        raise BenchError(
            f"the select kernel packed {sorted(packed)} entries where {wanted} reach the threshold on rank {comm.rank}"
        )
    return accumulated, wanted, seconds


def _topk_seconds(comm: MPI.Intracomm, timer: Timer, accumulated: Any, k: int) -> float | None:
    from jobs.bench.nccl import torch_problem

    if any(comm.allgather(torch_problem())):
        return None
    import torch

    with torch.no_grad():
        tensor = torch.from_dlpack(accumulated)
        seconds = timer.seconds(comm, lambda: torch.topk(tensor.abs(), k))
    torch.cuda.empty_cache()
    return seconds
