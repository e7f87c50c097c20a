"""Which algorithm a dense allreduce over peer memory takes: a table by length, measured once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cupy

MEASURED = tuple(4096 << i for i in range(15))
"""Lengths in bytes that are measured, 4 KB to 64 MB; a vector takes what is fastest at the next one."""


class Choice(NamedTuple):
    """Which algorithm vectors of at most so many bytes take; None: all that are longer."""

    nbytes: int | None
    algorithm: str


UNMEASURED = (Choice(64 << 10, "one_shot"), Choice(32 << 20, "lines"), Choice(None, "two_shot"))
"""Of two GPUs."""


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
