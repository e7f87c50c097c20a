"""A group's runs as one line: cut into the same pieces of the run, the mean and the extremes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.render.chart import Line, Vector
from jobs.render.style import OURS
from jobs.report.groups import Group
from jobs.report.summary import Run

POINTS = 240
"""Most points of a line: each is the mean of the steps that fall into its piece of the run."""
STEPS_A_POINT = 8
"""Fewest steps of such a piece, unless that leaves fewer than FEWEST_POINTS."""
FEWEST_POINTS = 20
FEW_POINTS = 80
"""As POINTS, where single steps scatter."""


def stepwise(
    group: Group,
    x_of: Callable[[Run], NDArray[Any]],
    y_of: Callable[[Run], NDArray[Any]],
    points: int = POINTS,
) -> Line | None:
    """A line of one value per step; None where no step has any."""
    count = max(len(run.steps["step"]) for run in group.runs)
    return binned(
        group,
        max(FEWEST_POINTS, min(points, count // STEPS_A_POINT)),
        [run.steps["step"].astype(np.float64) for run in group.runs],
        [np.asarray(x_of(run), np.float64) for run in group.runs],
        [np.asarray(y_of(run), np.float64) for run in group.runs],
    )


def binned(
    group: Group,
    points: int,
    steps: Sequence[Vector],
    xs: Sequence[Vector],
    ys: Sequence[Vector],
) -> Line | None:
    """Cut the steps of all runs into the same pieces, and average within them."""
    if not any(len(each) for each in steps):
        return None
    every = np.unique(np.concatenate(steps))
    edges = every[np.linspace(0, len(every), min(points, len(every)) + 1).astype(int)[:-1]]
    x, y = np.full((len(steps), len(edges)), np.nan), np.full((len(steps), len(edges)), np.nan)
    for row, (step, own_x, own_y) in enumerate(zip(steps, xs, ys, strict=True)):
        index = np.searchsorted(edges, step, side="right") - 1
        for values, out in ((own_x, x), (own_y, y)):
            good = np.isfinite(values)
            count = np.bincount(index[good], minlength=len(edges))
            total = np.bincount(index[good], values[good], minlength=len(edges))
            out[row] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return line_of(group, x, y)


def line_of(group: Group, x: Vector, y: Vector) -> Line | None:
    """The mean of the runs, float64[runs, points] each, and their extremes; points that no run has are left out."""
    known = np.isfinite(y).any(axis=0) & np.isfinite(x).any(axis=0)
    x, y = x[:, known], y[:, known]
    if not known.any():
        return None
    extremes = np.nanmin(y, axis=0), np.nanmax(y, axis=0)
    look: dict[str, Any] = {"colour": group.colour, "dashes": group.dashes, "ours": group.method == OURS}
    return Line(group.label, np.nanmean(x, axis=0), np.nanmean(y, axis=0), *extremes, **look)
