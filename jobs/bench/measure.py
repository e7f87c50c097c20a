"""Measuring loop: every contestant reduces the same gradients, one after another within each step.

The time of a step is that of its slowest rank, from a barrier until all ranks have finished, the device's work included;
drawing the gradient, filling one that is overwritten, and the first barrier are outside.
All contestants live in one process, so that a ratio is within one run.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.dense_allreduce import dense_words
from jobs.bench.device import Device, GradientSource
from oktopk import GradientAllreduce, StepReport

FIELDS = (
    "seconds",
    "exact",
    "k",
    "local_nnz",
    "global_nnz",
    "words",
    "messages",
    "control_words",
    "control_messages",
    "bytes_between",
)
"""What is kept of each step: "seconds" is this rank's time, the rest is as in StepReport."""

DENSE_WARMUP = 2
"""Steps discarded of a contestant that leaves nothing behind; the first one sets up its requests."""


class LibraryAllreduce(ABC):
    """A library's dense allreduce, in the shape of `oktopk.GradientAllreduce`, without its checks.

    Args:
        comm: intracommunicator. Collective: every rank must construct.
        length: elements of the gradient (n).
        method: that it is, in reports.

    Attributes:
        update: [n], the last step's result.
        width: words that an element takes.
    """

    update: Any
    width = 1.0

    def __init__(self, comm: MPI.Intracomm, length: int, method: str) -> None:
        self.length, self.method = length, method
        self._words, self._steps = dense_words(length, comm.size), 0

    @abstractmethod
    def _reduce(self, gradient: Any) -> None:
        """Reduce a gradient into `update`; collective."""

    def step(self, gradient: Any) -> StepReport:
        """Reduce one gradient; collective.

        The library does not say what it sends: words are `collectives.dense_allreduce.dense_words`, not counted.
        """
        began = time.perf_counter()
        self._reduce(gradient)
        seconds, n = {"allreduce": time.perf_counter() - began}, self.length
        report = StepReport(self._steps, self.method, n, n, seconds, True, local_nnz=n, global_nnz=n)
        report.words = round(self._words * self.width)
        self._steps += 1
        return report

    @abstractmethod
    def close(self) -> None:
        """Free what was set up; collective."""


Reducer = GradientAllreduce | LibraryAllreduce
"""What is measured, see `loaded`."""


def loaded(reducer: Reducer, gradient: Any) -> Any:
    """The gradient where `reducer.step` overwrites it, as after a backward pass; itself where it is only read.

    That is where its `load(gradient)` says, or in its `gradient_buffer`, as DistributedOptimizer's is.
    """
    if load := getattr(reducer, "load", None):
        return load(gradient)
    buffer = getattr(reducer, "gradient_buffer", None)
    if buffer is None:
        return gradient
    buffer[:] = gradient
    return buffer


@dataclass(frozen=True)
class Contestant:
    """One who takes part.

    Attributes:
        name: unique in a run.
        method: "mpi", or a name in oktopk.METHODS or jobs.bench.document.NCCL_ROWS.
        settings: keywords of oktopk.Settings in which it differs from the others.
        arguments: keywords of oktopk.GradientAllreduce itself, likewise.
        sparse: leaves entries behind, so that it must settle before it is measured.
        counted: its words are counted; else they are a formula's.
    """

    name: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    sparse: bool = True
    counted: bool = True


@dataclass(frozen=True)
class Course:
    """Numbers of steps.

    Attributes:
        warmup: steps that are discarded.
        steps: steps that are measured.
        dense_steps: steps that are measured of contestants that are not sparse, at most `steps`.
    """

    warmup: int
    steps: int
    dense_steps: int

    def runs(self, contestant: Contestant, step: int) -> bool:
        """Whether a contestant takes part in a step, counted from 0 for the first measured one."""
        return contestant.sparse or -DENSE_WARMUP <= step < self.dense_steps


@dataclass
class Samples:
    """What the ranks measured of one contestant.

    Attributes:
        fields: each of FIELDS, float64[ranks, steps].
        stages: seconds by stage, float64[ranks, steps].
        agreed: the last update was bit-identical on all ranks.
    """

    fields: dict[str, NDArray[np.float64]]
    stages: dict[str, NDArray[np.float64]]
    agreed: bool


class _Log:
    """One rank's side of Samples."""

    def __init__(self, contestant: Contestant) -> None:
        self._sparse = contestant.sparse
        self.rows: list[list[float]] = []
        self.stages: list[dict[str, float]] = []
        self.checksum = 0

    def add(self, seconds: float, report: StepReport, finish: dict[str, float]) -> None:
        rest = (float(getattr(report, name)) for name in FIELDS[2:])
        # a dense step has no thresholds: it is like any other
        exact = self._sparse and (report.local_exact or report.global_exact)
        self.rows.append([seconds, float(exact), *rest])
        self.stages.append({**report.seconds, **finish})


def measure(
    comm: MPI.Intracomm,
    contestants: Sequence[tuple[Contestant, Reducer]],
    source: GradientSource,
    device: Device,
    course: Course,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Samples]:
    """Run the course. Collective: every rank must call, with the same contestants and course.

    Args:
        progress: called before each step.

    Returns:
        name -> samples on rank 0, nothing on the others.
    """
    logs = {contestant.name: _Log(contestant) for contestant, _ in contestants}
    block = _BLOCK if device.asynchronous else 1
    gc.collect()
    gc.disable()  # a collection takes as long as many a step
    try:
        for first in range(-course.warmup, course.steps, block):
            steps = range(first, min(first + block, course.steps))
            shared = device.to_device(source.next()) if block == 1 else None
            for turn, (contestant, reducer) in enumerate(in_turn(contestants, first // block)):
                for step in steps:
                    if turn == 0:
                        progress()
                    if not course.runs(contestant, step):
                        continue
                    gradient = device.to_device(source.next()) if shared is None else shared
                    _one_step(comm, reducer, gradient, device, logs[contestant.name], step >= 0)
    finally:
        gc.enable()
    for contestant, reducer in contestants:
        logs[contestant.name].checksum = device.digest(reducer.update)
    everyone = comm.gather(logs)
    if everyone is None:
        return {}
    return {name: _combine([logs_of_rank[name] for logs_of_rank in everyone]) for name in logs}


def _one_step(
    comm: MPI.Intracomm,
    reducer: Reducer,
    gradient: Any,
    device: Device,
    log: _Log,
    counted: bool,
) -> None:
    """One step of one contestant."""
    in_place = loaded(reducer, gradient)
    device.finish()
    comm.Barrier()
    start = time.perf_counter()
    report = reducer.step(in_place)
    returned = time.perf_counter()
    device.finish()
    finished = time.perf_counter()
    # with more ranks than cores some start late: a step ends when the last one has. A rank with a core and a GPU of its own
    # times itself, and the longest counts: a barrier takes a tenth of such a step
    comm.Barrier()
    seconds = (finished if device.asynchronous else time.perf_counter()) - start
    if counted:
        # what a step left on the device is no stage's time
        log.add(seconds, report, {"finish": finished - returned} if device.asynchronous else {})


_BLOCK = 16
"""Steps that one contestant runs before the next does, where the host's part in a step counts: as in training, and unlike a
step between those of others, it finds its code and data in the host's caches."""


def in_turn(contestants: Sequence[Any], step: int) -> list[Any]:
    """The order of one step: everyone is first in turn, and so finds the gradient, but nothing of its own, in the caches."""
    turn = step % len(contestants)
    return [*contestants[turn:], *contestants[:turn]]


def _combine(logs: list[_Log]) -> Samples:
    table = np.array([log.rows for log in logs], np.float64).reshape(len(logs), -1, len(FIELDS))
    names = dict.fromkeys(stage for log in logs for step in log.stages for stage in step)
    stages = {
        # a stage that only some steps have took no time in the others
        name: np.array([[step.get(name, 0.0) for step in log.stages] for log in logs])
        for name in names
    }
    return Samples(
        fields={name: table[:, :, i] for i, name in enumerate(FIELDS)},
        stages=stages,
        agreed=len({log.checksum for log in logs}) == 1,
    )
