"""Dense allreduces of the GPUs of one host, from 4 KB to 512 MB: Ok-Topk's over peer memory beside NCCL's and torch's."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from collectives.connect import connect
from collectives.cuda.dense_algorithms import ALGORITHMS
from collectives.cuda.dense_p2p import DenseP2P
from collectives.cuda.device import Device
from collectives.limit import Limit
from collectives.symmetric_memory import symmetric_memory_problem
from jobs.bench.document import BenchError
from jobs.bench.gpu.links import copy_speed, event_seconds, median_of_slowest, round_trip
from jobs.bench.nccl import join, on_all, require_nccl
from jobs.bench.nccl_windows import DirectNccl, NcclError
from jobs.bench.options import Options

LENGTHS = tuple(4096 << i for i in range(18))
"""Bytes: 4 KB to 512 MB, which in float32 is about the gradient of BERT (133.5 M elements)."""

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMEOUT = 60.0
"""Seconds that a kernel of a call waits for another rank."""

CHECKED = 1 << 20
"""Bytes of the vector whose sum is compared with that in float64."""

CALLS = ((1 << 20, 100, 20), (16 << 20, 40, 10), (LENGTHS[-1], 16, 4))
"""Up to so many bytes: how many calls a graph holds, and how many the host launches. A graph's own launch takes some 17 us."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """A dense allreduce.

    Attributes:
        name: as the table has it.
        place: "in" or "out": where the result goes.
        call: makes the call of it that sums a vector into another one, or None where it does not take the length.
        source, target: the vectors of the longest length.
    """

    name: str
    place: str
    call: Callable[[Tensor, Tensor], Call | None]
    source: Tensor
    target: Tensor

    def call_on(self, n: int) -> Call | None:
        """Its call for the first n elements."""
        return self.call(self.source[:n], self.target[:n])


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
    try:
        direct = DirectNccl(comm)
    except NcclError as error:
        raise BenchError(f"--table dense: {error}") from None
    for kind in (options.gradient_type,) if options.gradient_type else TYPES:
        with _vectors(kind, comm, direct, left_out) as vectors:
            found = _contestants(dense, direct, kind, stream, vectors)
            errors[kind] = _errors(found, kind, stream, comm)
            for nbytes in LENGTHS:
                n = nbytes // TYPES[kind].itemsize
                row: dict[str, Any] = {
                    "type": kind,
                    "nbytes": nbytes,
                    "choice": dense.algorithm_for(nbytes, kind),
                    "times": {},
                }
                for one in found:
                    if (call := one.call_on(n)) is not None:
                        row["times"][f"{one.name}, {one.place}"] = _times(call, stream, nbytes, comm)
                cells.append(row)
    direct.close()
    dense.check()
    dense.close()
    floors = {"copy": copy_speed(comm), "round_trip": round_trip(transport, comm)} if comm.size > 1 else {}
    transport.close()
    return {
        "ranks": comm.size,
        "device": torch.cuda.get_device_name(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "choices": {kind: [tuple(choice) for choice in each] for kind, each in dense.choices.items()},
        "left_out": left_out,
        "floors": floors,
        "errors": errors,
        "cells": cells,
        "methods": [],
    }


Vectors = dict[str, Tensor]
"""Random ones are "vector", "torch" in its symmetric memory, "window" in NCCL's, if there are; "out", "window out": results."""


@contextmanager
def _vectors(
    kind: str, comm: MPI.Intracomm, direct: DirectNccl, left_out: dict[str, str]
) -> Iterator[Vectors]:
    n = LENGTHS[-1] // TYPES[kind].itemsize
    torch.manual_seed(comm.rank)
    vector = torch.randn(n, device="cuda").to(TYPES[kind])
    vectors = {"vector": vector, "out": torch.empty_like(vector)}

    def in_torch() -> Vectors:
        from torch.distributed import _symmetric_memory as symmetric_memory

        symmetric = symmetric_memory.empty(
            n, dtype=TYPES[kind], device=torch.device("cuda", torch.cuda.current_device())
        )
        symmetric_memory.rendezvous(symmetric, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        return {"torch": symmetric.copy_(vector)}

    def in_windows() -> Vectors:
        registered = direct.window(vector), direct.window(vector)
        return {"window": registered[0].copy_(vector), "window out": registered[1]}

    if kind == "float16":
        left_out["torch, float16"] = "its sums in symmetric memory do not take it"
    else:
        vectors |= on_all(comm, "torch", in_torch, left_out)
    vectors |= on_all(comm, "nccl-window", in_windows, left_out)
    yield vectors
    registered = "window" in vectors
    vectors.clear()
    if registered:
        direct.free_windows()
    torch.cuda.empty_cache()


def _contestants(
    dense: DenseP2P, direct: DirectNccl, kind: str, stream: torch.cuda.Stream, vectors: Vectors
) -> list[Contestant]:
    def ours(algorithm: str | None) -> Callable[[Tensor, Tensor], Call | None]:
        def call(source: Tensor, target: Tensor) -> Call | None:
            if algorithm and not dense.can_run(algorithm, source.nbytes):
                return None
            pointers, n = (source.data_ptr(), target.data_ptr(), 0), source.numel()
            return lambda: dense.enqueue(*pointers, n, kind, stream=stream.cuda_stream, algorithm=algorithm)

        return call

    def nccl(source: Tensor, target: Tensor) -> Call:
        return lambda: direct.all_reduce(source, target, stream.cuda_stream)

    vector, out = vectors["vector"], vectors["out"]
    found = [Contestant("oktopk", "in", ours(None), vector, vector)]
    found += [Contestant(name or "oktopk", "out", ours(name), vector, out) for name in (None, *ALGORITHMS)]
    found.append(Contestant("nccl", "in", lambda source, _: lambda: dist.all_reduce(source), vector, vector))
    found.append(Contestant("nccl", "out", nccl, vector, out))
    if "window" in vectors:
        found.append(Contestant("nccl-window", "out", nccl, vectors["window"], vectors["window out"]))
    if "torch" in vectors:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
        symmetric = vectors["torch"]
        found += [
            Contestant(
                "torch-one-shot", "out", lambda source, _: lambda: one(source, "sum", group), symmetric, out
            ),
            Contestant(
                "torch-two-shot",
                "in",
                lambda source, _: lambda: two(source, "sum", group),
                symmetric,
                symmetric,
            ),
        ]
    return found


def _errors(
    found: list[Contestant], kind: str, stream: torch.cuda.Stream, comm: MPI.Intracomm
) -> dict[str, float]:
    """‖sum − sum in float64‖ / ‖sum in float64‖ by contestant, the largest of all ranks. Collective.

    Raises:
        BenchError: one is far off, ranks disagree, or two of ours that must have the same bits; on every rank alike.
    """
    n = CHECKED // TYPES[kind].itemsize
    kept = found[0].source[:n].clone()
    parts = [torch.empty_like(kept) for _ in range(comm.size)]
    dist.all_gather(parts, kept)
    exact = torch.stack(parts).double().sum(dim=0)
    errors: dict[str, float] = {}
    bits = ""  # of ours
    for one in found:
        one.source[:n].copy_(kept)
        call = one.call_on(n)
        if call is None:
            continue
        torch.cuda.synchronize()
        comm.Barrier()
        with torch.cuda.stream(stream):
            result = call()
        torch.cuda.synchronize()
        if not isinstance(result, Tensor) or one.place == "in":
            result = one.target[:n]
        error = float((result.double() - exact).norm() / exact.norm())
        digest = hashlib.sha256(result.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        errors[f"{one.name}, {one.place}"] = comm.allreduce(error, MPI.MAX)
        if not errors[f"{one.name}, {one.place}"] < 0.02 or len(set(comm.allgather(digest))) > 1:
            raise BenchError(f"{one.name} in {kind} is off by {error:.2g} of the sum, or ranks disagree")
        if one.name in ("oktopk", *ALGORITHMS):
            bits = bits or digest
            if digest != bits:
                raise BenchError(f"{one.name} in {kind} has other bits than the algorithms before it")
        one.source[:n].copy_(kept)
    return errors


def _times(
    call: Call, stream: torch.cuda.Stream, nbytes: int, comm: MPI.Intracomm
) -> dict[str, float | None]:
    """Seconds of a call, see `measure_dense`; None for what could not be captured. Collective."""
    captured, launched = next(calls for most, *calls in CALLS if nbytes <= most)
    repeats = 7
    times: dict[str, float | None] = {}
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        comm.Barrier()
        times["waited"] = median_of_slowest(repeats, comm, lambda: _host_seconds(call, 1))
        comm.Barrier()
        times["launched"] = median_of_slowest(repeats, comm, lambda: _host_seconds(call, launched))
    graph = torch.cuda.CUDAGraph()
    comm.Barrier()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(captured):
                call()
    except RuntimeError:
        graph = None  # type: ignore[assignment]
    if not comm.allreduce(graph is not None, MPI.LAND):
        return times | {"graph": None}
    with torch.cuda.stream(stream):
        graph.replay()
        torch.cuda.synchronize()
        comm.Barrier()
        times["graph"] = median_of_slowest(repeats, comm, lambda: event_seconds(graph.replay) / captured)
    return times


def _host_seconds(call: Call, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls
