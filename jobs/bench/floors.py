"""Computes the least time of each stage, from bytes and messages and the measured speeds of the run.

The speeds are measured with all ranks at work at once, as they are in a step, so that a floor holds for cores and
links that are shared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.codec import ALONE, wire_layout
from collectives.traffic import WORD_BYTES

ENTRY_BYTES = 8
_WIRE_BYTES = 4 << 20
_ROUNDS = 50
_REPEATS = 4


@dataclass(frozen=True)
class Speeds:
    """Speeds of a rank while all ranks work; the best of several tries.

    Attributes:
        memory: bytes per second, read and written together, of adding one n-sized vector to another; on a GPU of copying it.
        wire: bytes per second sent, while as many are received.
        message: seconds that an 8-byte message takes in a ring in which every rank sends one.
    """

    memory: float
    wire: float
    message: float


def measure_speeds(comm: MPI.Intracomm, length: int) -> Speeds:
    """Measure on all ranks at once. Collective. Takes 2n words while it runs."""
    memory = 12 * length * _REPEATS / best_seconds(comm, 5, _adder(length))
    return ring_speeds(comm, memory, _WIRE_BYTES, *host_buffers(_WIRE_BYTES))


def _adder(length: int) -> Callable[[], None]:
    gradient, residual = np.ones(length, np.float32), np.zeros(length, np.float32)

    def add() -> None:
        for _ in range(_REPEATS):
            np.add(residual, gradient, out=residual)

    return add


def host_buffers(nbytes: int) -> tuple[Any, Any]:
    """What a rank sends in a ring, and what it receives into."""
    return np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)


def ring_speeds(comm: MPI.Intracomm, memory: float, nbytes: int, outgoing: Any, incoming: Any) -> Speeds:
    """Measure a ring of long messages, and one of short ones of host memory. Collective.

    Args:
        memory: as that of Speeds.
        nbytes: of a long message; outgoing, incoming: as `ring_exchange`.
    """
    if comm.size == 1:
        return Speeds(memory, math.inf, 0.0)
    long, short = ring_exchange(comm, outgoing, incoming), ring_exchange(comm, *host_buffers(8))
    wire = best_seconds(comm, 3, lambda: [long() for _ in range(_REPEATS)]) / _REPEATS
    message = best_seconds(comm, 3, lambda: [short() for _ in range(_ROUNDS)]) / _ROUNDS
    return Speeds(memory, nbytes / wire, message)


def ring_exchange(comm: MPI.Intracomm, outgoing: Any, incoming: Any) -> Callable[[], None]:
    """Send to the right and receive from the left, anything that MPI takes as a buffer."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.Sendrecv(outgoing, right, recvbuf=incoming, source=left)


def best_seconds(comm: MPI.Intracomm, tries: int, work: Callable[[], object]) -> float:
    """The time until all ranks have done the work, in the best try."""
    best = math.inf
    work()
    for _ in range(tries):
        comm.Barrier()
        start = time.perf_counter()
        work()
        comm.Barrier()  # ranks that share a core would else be timed one by one
        best = min(best, comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return best


@dataclass(frozen=True)
class Workload:
    """Size of a step's reduction.

    Attributes:
        length: n.
        ranks: P.
        selected: entries that a rank selected, on average.
        applied: entries of the update, on average.
        gradient_bytes: of an element of the gradient.
    """

    length: int
    ranks: int
    selected: float
    applied: float
    gradient_bytes: int = 4


def stage_floors(method: str, work: Workload, speeds: Speeds) -> dict[str, dict[str, float]]:
    """The least that every stage of one rank can do; stages that only exchange control have no floor.

    Nor has NCCL: where a switch adds up, it sends less than any formula of ours. Nor has a single rank: it exchanges nothing.

    Returns:
        Stage -> "memory_bytes", read and written; "wire_bytes", sent, or received where that is more; "messages" that must be
        waited for one after another; and "seconds" of all three at the run's speeds, none hidden behind another.
    """
    n, ranks = work.length, work.ranks
    if ranks == 1:
        return {}
    share, rounds = (ranks - 1) / ranks, (ranks - 1).bit_length()
    selected, applied = ENTRY_BYTES * work.selected, ENTRY_BYTES * work.applied
    # (bytes of memory, bytes on the wire, messages)
    select = ((8 + work.gradient_bytes) * n, 0, 0)  # gradient and residual read, residual written
    split = (0, selected * share, ranks - 1)
    sum_region = (selected + applied / ranks, 0, 0)
    # lists read, and one element each of the residual, the last update and this one written; that they lie scattered
    # over cache lines is no law of nature
    apply = (2 * applied + 3 * 4 * work.applied, 0, 0)
    stages: dict[str, dict[str, tuple[float, float, int]]] = {
        "dense": {
            "select": ((4 + work.gradient_bytes) * n, 0, 0),
            "allreduce": (12 * n * share, 8 * n * share, 2 * rounds),
        },
        "oktopk": {
            "select": select,
            "exchange": split,
            "reduce": sum_region,
            "allgather": (0, applied * share, rounds),
            "apply": apply,
        },
        "topka": {
            "select": select,
            "allgather": (0, selected * (ranks - 1), rounds),
            "reduce": (selected * ranks + applied, 0, 0),
            "apply": apply,
        },
        "topkdsa": {
            "select": select,
            "exchange": split,
            "reduce": sum_region,
            "allgather": (0, min(applied, 4 * n) * share, rounds),
            "apply": apply,
        },
        "gtopk": {
            "select": select,
            # along the longest path of the tree: read two lists, write one
            "exchange": (0, selected * rounds, rounds),
            "reduce": (3 * selected * rounds, 0, 0),
            "allgather": (0, applied * rounds, rounds),
            "apply": apply,
        },
    }
    # the indices that each rank chose, and then the values at as many indices as were applied, to their owners and from them
    chosen = WORD_BYTES * wire_layout(ALONE, round(work.selected), 0, n).words
    stages["union"] = {
        "select": select,
        "allgather": (0, chosen * ranks * share, rounds),
        "exchange": (2 * applied, 2 * WORD_BYTES * work.applied * share, ranks - 1 + rounds),
        "apply": apply,
    }
    # a second pass selects
    stages["gaussiank"] = stages["topka"] | {"select": ((12 + work.gradient_bytes) * n, 0, 0)}
    for library in ("mpi", "mpi-ring", "mpi-rabenseifner"):
        stages[library] = {"allreduce": stages["dense"]["allreduce"]}
    return {
        stage: {
            "memory_bytes": memory,
            "wire_bytes": wire,
            "messages": messages,
            "seconds": memory / speeds.memory + wire / speeds.wire + messages * speeds.message,
        }
        for stage, (memory, wire, messages) in stages.get(method, {}).items()
    }
