"""Dense allreduces of the GPUs of one host, from 4 KB to 256 MB: Ok-Topk's over peer memory beside NCCL's and torch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from collectives.connect import connect
from collectives.cuda.dense_p2p import ALGORITHMS, DenseP2P
from collectives.cuda.device import Device
from collectives.limit import Limit
from collectives.symmetric_memory import symmetric_memory_problem
from jobs.bench.document import BenchError
from jobs.bench.nccl import join, require_nccl
from jobs.bench.options import Options

LENGTHS = tuple(4096 << i for i in range(17))
"""Bytes: 4 KB to 256 MB."""

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMEOUT = 60.0
"""Seconds that a kernel of a call waits for another rank."""

CHECKED = 1 << 20
"""Bytes of the vector whose sum is compared with that in float64."""

SMALL = 1 << 20
"""Bytes up to which a graph holds many calls."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """A dense allreduce.

    Attributes:
        name: as the table has it.
        place: "in" or "out": where the result goes.
        call: makes the call of it that sums a vector into another one, or None where it does not take the length.
    """

    name: str
    place: str
    call: Callable[[Tensor, Tensor], Call | None]


def measure_dense(options: Options, comm: MPI.Intracomm) -> dict[str, Any]:
    """The run as it stands in the document, on rank 0. Collective.

    A time is that of the slowest rank, the median over repetitions: of a call in a CUDA graph of several; of a call that the host
    launches while others are on the stream; and of one that the host launches and waits for.

    Raises:
        BenchError: there is no GPU a rank, no peer memory or no NCCL, or a sum is wrong; on every rank alike.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    number, count = node.rank, torch.cuda.device_count()
    node.Free()
    if any(comm.allgather(number >= count)):
        raise BenchError("--table dense needs one host with a GPU for each rank")
    require_nccl(comm)
    import cupy

    torch.cuda.set_device(number)
    cupy.cuda.Device(number).use()
    join(comm)
    transport = connect(comm, Limit("jobs.bench --table dense", TIMEOUT))
    if problem := symmetric_memory_problem(transport):
        raise BenchError(f"--table dense: {problem}")
    stream = torch.cuda.Stream()
    dense = DenseP2P(transport, Device(cupy.cuda.ExternalStream(stream.cuda_stream)), TIMEOUT)
    cells: list[dict[str, Any]] = []
    errors: dict[str, dict[str, float]] = {}
    left_out: dict[str, str] = {}
    for kind in options.types or ("float32", "bfloat16"):
        with _vectors(kind, comm, left_out) as (vector, out, symmetric):
            found = _contestants(dense, kind, stream, symmetric, left_out)
            errors[kind] = _errors(found, kind, vector, out, symmetric, stream, comm)
            for nbytes in LENGTHS:
                n = nbytes // vector.element_size()
                row: dict[str, Any] = {
                    "type": kind,
                    "nbytes": nbytes,
                    "choice": dense.algorithm_for(nbytes),
                    "times": {},
                }
                for one in found:
                    source = symmetric if one.name.startswith("torch") and symmetric is not None else vector
                    target = source if one.place == "in" else out
                    call = one.call(source[:n], target[:n])
                    if call is not None:
                        row["times"][f"{one.name}, {one.place}"] = _times(call, stream, nbytes, comm)
                cells.append(row)
    dense.check()
    dense.close()
    transport.close()
    return {
        "ranks": comm.size,
        "device": torch.cuda.get_device_name(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "choices": [tuple(choice) for choice in dense.choices],
        "left_out": left_out,
        "floors": _floors(comm),
        "errors": errors,
        "cells": cells,
        "methods": [],
    }


@contextmanager
def _vectors(
    kind: str, comm: MPI.Intracomm, left_out: dict[str, str]
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Vectors of the longest length: random contents, results, and the contents in torch's symmetric memory, if there is any."""
    n = LENGTHS[-1] // torch.empty(0, dtype=TYPES[kind]).element_size()
    torch.manual_seed(comm.rank)
    vector = torch.randn(n, device="cuda").to(TYPES[kind])
    symmetric: Tensor | None = None
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        symmetric = symmetric_memory.empty(
            n, dtype=TYPES[kind], device=torch.device("cuda", torch.cuda.current_device())
        )
        symmetric_memory.rendezvous(symmetric, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        symmetric.copy_(vector)
    except (ImportError, RuntimeError, AttributeError) as error:
        left_out["torch"] = str(error).splitlines()[0]
    yield vector, torch.empty_like(vector), symmetric
    del vector, symmetric
    torch.cuda.empty_cache()


def _contestants(
    dense: DenseP2P, kind: str, stream: torch.cuda.Stream, symmetric: Tensor | None, left_out: dict[str, str]
) -> list[Contestant]:
    def ours(algorithm: str | None) -> Callable[[Tensor, Tensor], Call | None]:
        def call(source: Tensor, target: Tensor) -> Call | None:
            if algorithm and not dense.can_run(algorithm, source.nbytes):
                return None
            pointers, n = (source.data_ptr(), target.data_ptr(), 0), source.numel()
            return lambda: dense.enqueue(*pointers, n, kind, stream=stream.cuda_stream, algorithm=algorithm)

        return call

    found = [Contestant("oktopk", place, ours(None)) for place in ("in", "out")]
    found += [Contestant(name, "out", ours(name)) for name in ALGORITHMS]
    found.append(Contestant("nccl", "in", lambda source, _: lambda: dist.all_reduce(source)))
    if symmetric is not None:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
        found += [
            Contestant("torch-one-shot", "out", lambda source, _: lambda: one(source, "sum", group)),
            Contestant("torch-two-shot", "in", lambda source, _: lambda: two(source, "sum", group)),
        ]
    return found


def _errors(
    found: list[Contestant],
    kind: str,
    vector: Tensor,
    out: Tensor,
    symmetric: Tensor | None,
    stream: torch.cuda.Stream,
    comm: MPI.Intracomm,
) -> dict[str, float]:
    """‖sum − sum in float64‖ / ‖sum in float64‖ by contestant, the largest of all ranks. Collective.

    Raises:
        BenchError: one is far off, or ranks disagree; on every rank alike.
    """
    n = CHECKED // vector.element_size()
    kept = vector[:n].clone()
    parts = [torch.empty_like(kept) for _ in range(comm.size)]
    dist.all_gather(parts, kept)
    exact = torch.stack(parts).double().sum(dim=0)
    errors: dict[str, float] = {}
    for one in found:
        source = symmetric if one.name.startswith("torch") and symmetric is not None else vector
        source[:n].copy_(kept)
        call = one.call(source[:n], source[:n] if one.place == "in" else out[:n])
        if call is None:
            continue
        torch.cuda.synchronize()
        comm.Barrier()
        with torch.cuda.stream(stream):
            result = call()
        torch.cuda.synchronize()
        if not isinstance(result, Tensor) or one.place == "in":
            result = source[:n] if one.place == "in" else out[:n]
        error = float((result.double() - exact).norm() / exact.norm())
        digest = result.view(torch.uint8).to(torch.int64).sum().item()
        errors[f"{one.name}, {one.place}"] = comm.allreduce(error, MPI.MAX)
        if not errors[f"{one.name}, {one.place}"] < 0.02 or len(set(comm.allgather(digest))) > 1:
            raise BenchError(f"{one.name} in {kind} is off by {error:.2g} of the sum, or ranks disagree")
        source[:n].copy_(kept)
    return errors


def _times(
    call: Call, stream: torch.cuda.Stream, nbytes: int, comm: MPI.Intracomm
) -> dict[str, float | None]:
    """Seconds of a call, see `measure_dense`; None for what could not be captured. Collective."""
    calls, repeats = (20, 11) if nbytes <= SMALL else (4, 7)
    times: dict[str, float | None] = {}
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        comm.Barrier()
        times["waited"] = _median(repeats, comm, lambda: _host_seconds(call, 1))
        comm.Barrier()
        times["launched"] = _median(repeats, comm, lambda: _host_seconds(call, calls))
    graph = torch.cuda.CUDAGraph()
    comm.Barrier()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
    except RuntimeError:
        graph = None  # type: ignore[assignment]
    if not comm.allreduce(graph is not None, MPI.LAND):
        return times | {"graph": None}
    with torch.cuda.stream(stream):
        graph.replay()
        torch.cuda.synchronize()
        comm.Barrier()
        times["graph"] = _median(repeats, comm, lambda: _event_seconds(graph.replay) / calls)
    return times


def _median(repeats: int, comm: MPI.Intracomm, seconds: Callable[[], float]) -> float:
    return comm.allreduce(float(np.median([seconds() for _ in range(repeats)])), MPI.MAX)


def _host_seconds(call: Call, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def _event_seconds(call: Call) -> float:
    """Seconds on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _floors(comm: MPI.Intracomm) -> dict[str, float]:
    """What bounds the times: bytes per second of a copy to the next rank's GPU while all copy, one way. Collective."""
    nbytes, ranks = 256 << 20, comm.size
    source = torch.ones(nbytes // 4, device="cuda")
    number = torch.cuda.current_device()
    peer = torch.empty(nbytes // 4, device=torch.device("cuda", (number + 1) % torch.cuda.device_count()))
    for _ in range(2):
        peer.copy_(source)
    torch.cuda.synchronize()
    comm.Barrier()
    seconds = _median(5, comm, lambda: _event_seconds(lambda: peer.copy_(source)))
    return {"copy": nbytes / seconds} if ranks > 1 else {}
