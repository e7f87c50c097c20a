"""Times each phase with device events; reads them once per flush, so steps never stall."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from jobs.run.columns import BUCKET, PHASES, TIMELINE_COLUMNS, Columns, Span, Step
from jobs.train.placement import Placement
from oktopk import StepReport

ROUND_TRIPS = 16


@dataclass
class PhaseTimer:
    """Marks the end of each phase of a step, and gives it an NVTX range on a GPU.

    Args:
        placement: whose clock it is.
        starts: mark starts, too: for a timeline, which tells the time between two phases.
    """

    placement: Placement
    starts: bool = False
    phases: list[str] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks.append(self.placement.mark())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; in sums it has the time since the one before ended."""
        if self.starts:
            self._mark("")
        with self.placement.range(name):
            yield
        self._mark(name)

    def _mark(self, phase: str) -> None:
        """A phase ends here, or with no name the time between two."""
        self.phases.append(phase)
        self.marks.append(self.placement.mark())


@dataclass
class TimedStep:
    """One step whose times and loss were not waited for yet.

    Attributes:
        report: of the reduction.
        losses: of its batches, on the device; their mean is the step's.
        timer: of PHASES.
        learning_rate: it was done with.
    """

    report: StepReport
    losses: list[torch.Tensor]
    timer: PhaseTimer
    learning_rate: float


def measure(steps: Sequence[TimedStep], began: float) -> list[Step]:
    """Wait for the steps, and read their clocks and losses in one go.

    Args:
        steps: in order.
        began: when training began, by time.perf_counter().
    """
    if not steps:
        return []
    placement = steps[0].timer.placement
    times = iter(placement.read([mark for step in steps for mark in step.timer.marks]))
    losses = iter(torch.stack([loss for step in steps for loss in step.losses]).tolist())
    measured = []
    for step in steps:
        last = start = next(times)
        seconds = dict.fromkeys(PHASES, 0.0)
        phases = []
        for phase in step.timer.phases:
            now = next(times)
            if phase:
                seconds[phase] += now - last
                phases.append(Span(phase, 0, start, now - start))
                last = now
            start = now
        loss = sum(next(losses) for _ in step.losses) / len(step.losses)
        measured.append(Step(step.report, loss, step.learning_rate, last - began, seconds, tuple(phases)))
    return measured


def clock_ahead(comm: MPI.Intracomm) -> float:
    """Seconds that this rank's time.perf_counter() is ahead of rank 0's. Collective.

    It is right to half of the fastest of ROUND_TRIPS messages to rank 0 and back. Clocks of unequal speed drift apart later.
    """
    trips = [(0.0, 0.0)] if comm.rank == 0 else []
    for rank in range(1, comm.size):
        for _ in range(ROUND_TRIPS):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(time.perf_counter(), rank)
            elif comm.rank == rank:
                sent = time.perf_counter()
                comm.send(None, 0)
                theirs = comm.recv(source=0)
                back = time.perf_counter()
                trips.append((back - sent, (sent + back) / 2 - theirs))
    return min(trips)[1]


def timeline(steps: Sequence[Step], between: Sequence[tuple[int, Span]], rank: int, began: float) -> Columns:
    """The columns of TIMELINE_COLUMNS of one rank.

    Args:
        steps: as it measured them.
        between: step before -> what was done then.
        rank: its number.
        began: when training began on rank 0, by this rank's clock.
    """
    spans = list(between)
    for step in steps:
        number = step.report.step + 1
        spans += [(number, span) for span in step.phases]
        spans += [(number, Span(stage, 1, start, took)) for stage, start, took in step.report.spans]
        for bucket, report in enumerate(step.report.buckets):
            stages = [Span(stage, 2, start, took, bucket) for stage, start, took in report.spans]
            if stages:
                first, last = stages[0].start, stages[-1].start + stages[-1].seconds
                spans += [(number, span) for span in (Span(BUCKET, 1, first, last - first, bucket), *stages)]
    values: dict[str, list[object]] = {
        "step": [step for step, _ in spans],
        "rank": [rank] * len(spans),
        "name": [span.name for _, span in spans],
        "depth": [span.depth for _, span in spans],
        "start": [span.start - began for _, span in spans],
        "seconds": [span.seconds for _, span in spans],
        "bucket": [span.bucket for _, span in spans],
    }
    return {name: np.array(values[name], column.dtype) for name, column in TIMELINE_COLUMNS.items()}
