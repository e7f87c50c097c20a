"""Measures a GPU's copy and link bandwidth, by events on all ranks at once."""

from __future__ import annotations

import math
import statistics
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

from collectives.cuda.device import Device
from collectives.cuda.ucx import device_memory_problem
from jobs.bench.floors import Speeds, best_seconds, message_seconds, ring_exchange

_WIRE_BYTES = 64 << 20
_WIRE_REPEATS = 4
_COPY_BYTES = 512 << 20
_TRIES = 11


def copy_bandwidth(comm: MPI.Intracomm) -> float:
    """Bytes per second, read and written together, of a device-to-device copy of 512 MB. Collective.

    The median of some tries, on the slowest rank. Before each 512 MB are filled: what the caches held is gone, and the host gets
    ahead of the device.
    """
    source = cupy.zeros(_COPY_BYTES, np.uint8)
    dest, flushed = cupy.empty_like(source), cupy.empty_like(source)
    spent = []
    for attempt in range(_TRIES + 1):
        comm.Barrier()
        flushed.fill(attempt)
        began, ended = cupy.cuda.Event(), cupy.cuda.Event()
        began.record()
        dest.data.copy_from_device_async(source.data, _COPY_BYTES, cupy.cuda.get_current_stream())
        ended.record()
        ended.synchronize()
        spent.append(cupy.cuda.get_elapsed_time(began, ended) / 1e3)
    return 2 * _COPY_BYTES / comm.allreduce(statistics.median(spent[1:]), MPI.MAX)


def measure_device_speeds(comm: MPI.Intracomm, length: int) -> Speeds:
    """Copy bandwidth; the bandwidth of a ring of 64 MB messages between GPUs; the latency of one through host memory. Collective.

    A small message between GPUs takes MPI longer than one through host memory, and writing into a peer's memory need not: the
    floor is the lower one. Takes 1.7 GB while it runs.
    """
    memory = copy_bandwidth(comm)
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
