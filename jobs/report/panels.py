"""The data of each picture, which jobs.report.draw draws and a CSV file holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.report.groups import Group
from jobs.report.summary import Run

POINTS = 240
"""Most points of a line: each is the mean of the steps that fall into its piece of the run."""
STEPS_A_POINT = 8
"""Fewest steps of such a piece, unless that leaves fewer than FEWEST_POINTS."""
FEWEST_POINTS = 20
FEW_POINTS = 80
"""As POINTS, where single steps scatter."""

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One group's line: float64[points] each; low and high are the least and the largest of its runs."""

    group: Group
    x: Vector
    y: Vector
    low: Vector
    high: Vector


@dataclass(frozen=True)
class Level:
    """A horizontal line at a value that something is held against."""

    value: float
    label: str


@dataclass(frozen=True)
class LinePanel:
    """Lines over something.

    name is that of its CSV file; columns those of its x and y; percent and log say how the axes count.
    """

    name: str
    title: str
    note: str
    x_label: str
    y_label: str
    columns: tuple[str, str]
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    marks: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """The points, as the CSV file has them, and the levels that they are to be compared with."""
        x, y = self.columns
        rows: list[dict[str, Any]] = []
        for line in self.lines:
            for values in zip(line.x, line.y, line.low, line.high, strict=True):
                named = dict(zip((x, y, f"{y}_least", f"{y}_largest"), map(float, values), strict=True))
                rows.append({"series": line.group.label, **named})
        levels = [{"series": level.label, y: level.value} for level in self.levels]
        return rows + levels if rows else []


@dataclass(frozen=True)
class DrawnPanel:
    """A picture that is drawn already: an SVG document, and its points as the CSV file has them."""

    name: str
    title: str
    note: str
    document: str
    points: tuple[dict[str, Any], ...]

    def rows(self) -> list[dict[str, Any]]:
        """The points."""
        return list(self.points)


Picture = LinePanel | DrawnPanel


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
    return Line(
        group,
        np.nanmean(x, axis=0),
        np.nanmean(y, axis=0),
        np.nanmin(y, axis=0),
        np.nanmax(y, axis=0),
    )
