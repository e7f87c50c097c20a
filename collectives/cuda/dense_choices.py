"""Which algorithm a dense allreduce over peer memory takes: a table by length, measured once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np

from collectives.cuda.device import Device
from collectives.transport import Transport

MEASURED = tuple(4096 << i for i in range(15))
"""Lengths in bytes that are measured, 4 KB to 64 MB; a vector takes what is fastest at the next one."""


class Choice(NamedTuple):
    """Which algorithm vectors of at most so many bytes take; None: all that are longer."""

    nbytes: int | None
    algorithm: str


UNMEASURED = (
    Choice(128 << 10, "one_shot"),
    Choice(32 << 20, "lines"),
    Choice(None, "two_shot"),
)
"""Of 2 H100 in float32 at ff5fe90, see `docs/results/dense.md`; `lines` and `two_shot_lines` differ by 3 % at most there."""


class NotMeasuredError(RuntimeError):
    """A rank has no room to measure in; nothing was launched. On every rank alike, naming the ranks."""


def choices_by(seconds: Mapping[tuple[int, str], float]) -> tuple[Choice, ...]:
    """The table of choices from measured times.

    Args:
        seconds: by length in bytes and algorithm.
    """
    fastest: dict[int, str] = {}
    for nbytes in sorted({nbytes for nbytes, _ in seconds}):
        fastest[nbytes] = min((time, name) for (size, name), time in seconds.items() if size == nbytes)[1]
    lengths = list(fastest)
    joined = [
        Choice(nbytes, fastest[nbytes])
        for nbytes, longer in itertools.pairwise(lengths)
        if fastest[longer] != fastest[nbytes]
    ]
    return (*joined, Choice(None, fastest[lengths[-1]]))


def graph_seconds(call: Callable[[], None], stream: Any, calls: int = 10, replays: int = 5) -> float:
    """Seconds of a call in a CUDA graph of several, the shortest of several replays."""
    call()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        for _ in range(calls):
            call()
        graph = stream.end_capture()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(replays):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / calls)
    return float(min(times))


def measured_seconds(
    runs: Sequence[tuple[int, str]],
    call: Callable[[int, int, str, int], None],
    transport: Transport,
    device: Device,
    abort: Callable[[], None],
) -> dict[tuple[int, str], float]:
    """Seconds of the slowest rank. Collective.

    Args:
        runs: lengths in bytes, each with an algorithm.
        call: launches one, in place: the address of a vector, its length in bytes, the algorithm and a stream.
        abort: ends the waiting of the others' kernels.

    Raises:
        NotMeasuredError: a rank has no room.
        RuntimeError: a launch failed, and all were aborted; on every rank alike, naming the ranks.
    """
    times: list[float] = []
    cannot = "dense allreduces over peer memory cannot be measured"
    with transport.together_or(cannot, NotMeasuredError):
        vector = device.allocate(max(nbytes for nbytes, _ in runs) // 4, np.float32)
        with device.gpu:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                vector.fill(0)
    with transport.together_or(cannot, RuntimeError), device.gpu:
        try:
            for nbytes, name in runs:
                one = functools.partial(call, vector.data.ptr, nbytes, name, stream.ptr)
                times.append(graph_seconds(one, stream))
        except Exception:
            abort()  # the others' kernels wait for this rank's
            raise
    slowest = [max(each) for each in zip(*transport.allgather_objects(times), strict=True)]
    return dict(zip(runs, slowest, strict=True))
