"""Times of steps: dense sums and sparse ones over the links, and the kernels that they call."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from typing import Any

import numpy as np

from collectives.codec import make_codec
from collectives.host_transport import HostTransport
from collectives.sparse import ENTRY
from oktopk.allreduce import GradientAllreduce
from oktopk.replay.prediction import code_of

_WARM, _TIMED = 6, 8
_DENSE = 1, 3  # the same of dense steps, which are alike and take long
_KERNELS_LENGTH = 1 << 22


def gradients(length: int, rank: int) -> Any:
    """float32[2, n], two gradients of heavy tails, by turns those of steps."""
    drawn = np.random.default_rng(rank)
    values = drawn.standard_normal((2, length), np.float32)
    values *= np.exp(drawn.standard_normal((2, length), np.float32))
    return values


def step_row(
    transport: HostTransport, length: int, method: str, vectors: Any, **settings: Any
) -> dict[str, Any]:
    """What steps of a method take. Collective.

    Args:
        vectors: as `gradients`.

    Returns:
        method, length, settings as taken; seconds: of a regular step on the slowest rank, the
        median; bytes and bytes_between that a rank sends, in the mean over ranks; parts: stage ->
        seconds of this rank, in the mean; slowest: those of the slowest rank, the median; entries:
        that this rank selected, and applied.
    """
    spent, reports = [], []
    never: dict[str, Any] = {"threshold_interval": 10**6, "boundary_interval": 10**6}
    with closing(GradientAllreduce(transport, length, method, **never, **settings)) as reducer:
        warm, timed = _DENSE if method == "dense" else (_WARM, _TIMED)
        for number in range(warm + timed):
            transport.barrier()
            start = time.perf_counter()
            report = reducer.step(vectors[number % 2])
            if number >= warm:
                spent.append(time.perf_counter() - start)
                reports.append(report)
        levels = reducer.levels
    # control integers of 64 bits: nanoseconds and bytes
    nanoseconds = [round(1e9 * each) for each in spent]
    sent = [
        statistics.fmean(each.bytes for each in reports),
        statistics.fmean(each.bytes_between for each in reports),
    ]
    slowest = transport.allgather_control(np.array(nanoseconds, np.int64)).max(axis=0) / 1e9
    counted = np.array([round(each) for each in sent], np.int64)
    everyone = transport.allgather_control(counted).mean(axis=0)
    names = list(dict.fromkeys(name for each in reports for name in each.seconds))
    last, times = reports[-1], [each.seconds for each in reports]
    parts = {name: statistics.fmean(each.get(name, 0.0) for each in times) for name in names}
    by_step = zip(*transport.allgather_objects(times), strict=True)
    longest = [{name: max(each.get(name, 0.0) for each in ranks) for name in names} for ranks in by_step]
    return {
        "method": method,
        "length": length,
        "density": settings.get("density", 1.0),
        "wire": last.wire,
        "levels": levels,
        "seconds": float(np.median(slowest)),
        "bytes": float(everyone[0]),
        "bytes_between": float(everyone[1]),
        "parts": parts,
        "slowest": {name: statistics.median(each[name] for each in longest) for name in names},
        "entries": [last.local_nnz, last.global_nnz],
    }


def library_row(transport: HostTransport, length: int) -> dict[str, Any]:
    """A dense sum by the communication library's own allreduce, of float32. Collective."""
    vector: Any = np.ones(length, np.float32)
    spent = []
    for _ in range(4):
        transport.barrier()
        start = time.perf_counter()
        transport.allreduce_control(vector)
        spent.append(time.perf_counter() - start)
    own_median = np.array([round(1e9 * statistics.median(spent[1:]))], np.int64)
    seconds = int(transport.allgather_control(own_median).max()) / 1e9
    ranks = transport.size
    sent = 4 * length * 2 * (ranks - 1) / ranks  # the least that a rank sends
    name = f"{transport.library} allreduce"
    values: dict[str, Any] = {"method": name, "length": length, "density": 1.0, "wire": "float32"}
    values |= {"levels": "-", "seconds": seconds, "bytes": sent, "bytes_between": None}
    return values | {"parts": {}, "slowest": {}, "entries": [length, length]}


def kernels(transport: HostTransport, ranks_per_host: int = 0) -> dict[str, list[float]]:
    """Seconds of a kernel's call and of each element, while all ranks compute. Collective.

    By the stages of steps, of the slowest rank, for which all wait: ranks may share cores. Coding by
    itself, in the mean. What a call takes is in what its elements do. Elements
    in the memory of other ranks are measured where several hosts have equally many, several ranks.
    """
    length, density = _KERNELS_LENGTH, 0.01
    vectors = gradients(length, transport.rank)
    settings: dict[str, Any] = {"wire": "plain", "levels": "flat"}
    sparse = step_row(transport, length, "oktopk", vectors, density=density, **settings)
    few = length // 4  # dense sums take long on slow links, and nothing of them is taken
    dense = step_row(transport, few, "dense", vectors[:, :few].copy(), levels="flat")
    selected, applied = sparse["entries"]
    seconds = {
        "select": sparse["slowest"]["select"] / length,
        "sum": sparse["slowest"]["reduce"] / max(selected, 1),
        "code": _coding(transport, "float32"),
        **{code_of(wire): _coding(transport, wire) for wire in ("bfloat16", "int8", "int4")},
        # the residual at what was selected, then the update at what is applied
        "entries": sparse["slowest"]["apply"] / max(selected, applied, 1) / 2,
        "vector": dense["slowest"]["select"] / few,
    }
    many = transport.hosts.count(transport.hosts[transport.rank])
    mean = _host_mean(transport, few, ranks_per_host)
    if mean is not None:
        # a shard of every gradient is read for the sum, and those of the others' means: all but
        # this rank's own lie in memory of others
        own, others = 2 * few / many, 2 * few * (many - 1) / many
        seconds["peer"] = max(mean - own * seconds["vector"], 0.1 * mean) / others
    own_times = np.array([round(1e15 * seconds[name]) for name in seconds], np.int64)
    means = transport.allgather_control(own_times).mean(axis=0) / 1e15
    return {name: [0.0, float(each)] for name, each in zip(seconds, means, strict=True)}


def _host_mean(transport: HostTransport, length: int, ranks_per_host: int) -> float | None:
    """Seconds of the mean of a host's gradients; None where steps are flat. Collective."""
    settings: dict[str, Any] = {"density": 0.01, "ranks_per_host": ranks_per_host}
    spent = []
    with closing(GradientAllreduce(transport, length, "oktopk", **settings)) as reducer:
        if reducer.levels != "hosts" or len({*map(transport.hosts.count, transport.hosts)}) > 1:
            return None
        for _ in range(6):
            transport.barrier()
            start = time.perf_counter()
            reducer.mean_in_host()
            spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])


def _coding(transport: HostTransport, wire: str) -> float:
    """Seconds of an entry that is encoded, or decoded, on a wire."""
    count = 1 << 16
    entries = np.zeros(count, ENTRY)
    entries["index"] = 100 * np.arange(count)
    entries["value"] = np.linspace(1, 2, count)
    codec = make_codec(wire, transport.kernels, transport.workspace, 2)
    limits = 0, 100 * count
    coded = np.zeros(codec.wire_bytes(count, *limits) // ENTRY.itemsize, ENTRY)
    out, spent = np.zeros(count, ENTRY), []
    for _ in range(6):
        kept = entries.copy()  # values become rounding errors
        start = time.perf_counter()
        codec.encode(kept, *limits, coded, 1)
        codec.decode(coded, *limits, out, 0)
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:]) / 2 / count
