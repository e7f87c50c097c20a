"""What the links between the GPUs of a host give: a copy's speed, and a flag's round trip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cupy
import numpy as np
import torch
from mpi4py import MPI

from collectives.cuda.device import Device
from collectives.cuda.launch import compiled
from collectives.symmetric_memory import SymmetricMemory
from collectives.transport import Transport

ROUNDS = 1000
"""Round trips of a flag in a launch."""


def median_of_slowest(repeats: int, comm: MPI.Intracomm, seconds: Callable[[], float]) -> float:
    """The median of several measurements, on the slowest rank. Collective."""
    return comm.allreduce(float(np.median([seconds() for _ in range(repeats)])), MPI.MAX)


def event_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call on torch's current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def copy_speed(comm: MPI.Intracomm) -> float:
    """Bytes per second of a copy to the next rank's GPU while all copy, one way. Collective."""
    nbytes = 256 << 20
    source = torch.ones(nbytes // 4, device="cuda")
    number = torch.cuda.current_device()
    peer = torch.empty(nbytes // 4, device=torch.device("cuda", (number + 1) % torch.cuda.device_count()))
    for _ in range(2):
        peer.copy_(source)
    torch.cuda.synchronize()
    comm.Barrier()
    return nbytes / median_of_slowest(5, comm, lambda: event_seconds(lambda: peer.copy_(source)))


def round_trip(transport: Transport, comm: MPI.Intracomm) -> float:
    """Seconds of a flag from the GPU of rank 0 to that of rank 1 and back. Collective, of two ranks or more."""
    device = Device()
    memory = SymmetricMemory(transport, device, 4)
    mine = memory.array(1, np.uint32)
    mine.fill(0)
    cupy.cuda.Device().synchronize()
    transport.barrier()
    kernel = compiled(Path(__file__).with_name("ping_pong.cu")).get_function("ping_pong")
    rank = transport.rank
    times: list[float] = []
    for launch in range(6 if rank < 2 else 0):  # the first one loads the kernel
        theirs = memory.bases[1 - rank] + memory.first
        given = (mine.data.ptr, theirs, np.int32(rank == 0), np.uint32(ROUNDS), np.uint32(launch * ROUNDS))
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        kernel((1,), (1,), given)
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / ROUNDS)
    transport.barrier()
    memory.close()
    return comm.allreduce(float(np.median(times[1:])) if times else 0.0, MPI.MAX)
