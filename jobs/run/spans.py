"""What the spans of a timeline tell: a rank that is late, and what is hidden and exposed.

Spans are the columns of TIMELINE_COLUMNS, of all ranks, with `name` as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.run.columns import BUCKET, PHASES, TIMELINE_COLUMNS, Columns

OWN_WORK = ("data", "forward", "backward")
"""Phases in which a rank waits for no other, but where gradients are reduced behind the backward pass."""
LATE = 1.1
"""Times the median of the others that a rank's own work takes, from which on it is named."""


class SlowRank(NamedTuple):
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        seconds: of its own work in a step, median over the steps.
        others: the median of that over the other ranks.
        phase: in which it loses most.
    """

    rank: int
    seconds: float
    others: float
    phase: str


def rows_of(spans: Columns) -> Iterator[tuple[Any, ...]]:
    """The spans one by one, each with its values in the order of TIMELINE_COLUMNS."""
    return zip(*(spans[key].tolist() for key in TIMELINE_COLUMNS), strict=True)


def covered(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> float:
    """Seconds that lie in at least one of the spans from starts[i] to ends[i]; one that ends before it starts is none."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reached = np.maximum.accumulate(np.concatenate([starts[:1], ends[:-1]]))
    return float(np.maximum(0.0, ends - np.maximum(starts, reached)).sum())


def _chosen(spans: Columns, which: NDArray[np.bool_]) -> Columns:
    return {name: values[which] for name, values in spans.items()}


def exposed_seconds(spans: Columns) -> NDArray[np.float64]:
    """float64[spans]: of a bucket, and of a stage of one, what comes after the end of its step's backward pass; others 0.

    The rest of it is hidden behind the backward pass.
    """
    ends = spans["start"] + spans["seconds"]
    after = np.maximum(0.0, ends - np.maximum(spans["start"], _backward_ends(spans)))
    return np.where(spans["bucket"] >= 0, after, 0.0)


def _backward_ends(spans: Columns) -> NDArray[np.float64]:
    """float64[spans]: when the last backward pass of a span's step ended on its rank."""
    latest: dict[tuple[int, int], float] = {}
    for step, rank, name, _, start, seconds, _ in rows_of(spans):
        if name == "backward":
            latest[step, rank] = max(start + seconds, latest.get((step, rank), -np.inf))
    keys = zip(spans["step"].tolist(), spans["rank"].tolist(), strict=True)
    return np.array([latest.get(key, np.inf) for key in keys])


def overlap_seconds(spans: Columns) -> tuple[float, float] | None:
    """Seconds a step in which buckets are reduced, hidden behind the backward pass and exposed after it; None without buckets.

    Mean over steps and ranks. Time of several buckets at once counts once.
    """
    line, buckets = _backward_ends(spans), spans["name"] == BUCKET
    spans, line = _chosen(spans, buckets), line[buckets]
    starts, ends = spans["start"], spans["start"] + spans["seconds"]
    seconds = []
    for step, rank in set(zip(spans["step"].tolist(), spans["rank"].tolist(), strict=True)):
        own = (spans["step"] == step) & (spans["rank"] == rank)
        hidden = covered(starts[own], np.minimum(ends, line)[own])
        seconds.append((hidden, covered(np.maximum(starts, line)[own], ends[own])))
    if not seconds:
        return None
    hidden, exposed = np.mean(seconds, axis=0).tolist()
    return hidden, exposed


def phase_seconds(spans: Columns) -> dict[str, NDArray[np.float64]]:
    """Phase -> float64[ranks]: seconds of it in a step, median over the steps but the run's first, where there are others."""
    ranks, steps = np.unique(spans["rank"]), np.unique(spans["step"])
    first = min(2, steps[-1])
    medians = {}
    for phase in PHASES:
        own = (spans["name"] == phase) & (spans["depth"] == 0) & (spans["step"] >= first)
        sums = np.zeros((len(ranks), len(steps)))
        places = np.searchsorted(ranks, spans["rank"][own]), np.searchsorted(steps, spans["step"][own])
        np.add.at(sums, places, spans["seconds"][own])
        medians[phase] = np.median(sums[:, steps >= first], axis=1)
    return medians


def slow_rank(spans: Columns) -> SlowRank | None:
    """The rank whose own work takes longest; None where it takes less than LATE times that of the others, or is alone."""
    seconds = phase_seconds(spans)
    ranks = np.unique(spans["rank"])
    own = np.sum([seconds[phase] for phase in OWN_WORK], axis=0)
    if len(ranks) < 2:
        return None
    slowest = int(np.argmax(own))
    others = float(np.median(np.delete(own, slowest)))
    if own[slowest] < LATE * others:
        return None
    lost = {p: seconds[p][slowest] - np.median(np.delete(seconds[p], slowest)) for p in OWN_WORK}
    return SlowRank(int(ranks[slowest]), float(own[slowest]), others, max(lost, key=lost.__getitem__))
