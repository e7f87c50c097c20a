"""The data of a picture, which jobs.render.draw draws and a CSV file holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.render.style import GREY

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One line: float64[points] each.

    Attributes:
        low, high: the least and the largest of what y is the mean of; None where there is one measurement.
        ours: it is Ok-Topk's, which stands out beside others.
    """

    label: str
    x: Vector
    y: Vector
    low: Vector | None = None
    high: Vector | None = None
    colour: str = GREY
    dashes: Any = "solid"
    marker: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line at a value that something is held against."""

    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """How an axis counts.

    Attributes:
        label: what it counts, with the unit.
        column: its name in the CSV file.
        log: base of a logarithmic axis; 0 for a linear one.
        form: text of a value; None: a number, from 10,000 on with a prefix such as k.
        prefixes: numbers have such a prefix, whatever their size.
        each: the values of the lines are its ticks; infinity is drawn beyond the largest other one.
        percent: shares, of which those far below the best are cut off.
        zero: it begins at 0.
    """

    label: str
    column: str
    log: int = 0
    form: Callable[[float], str] | None = None
    prefixes: bool = False
    each: bool = False
    percent: bool = False
    zero: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over something.

    Attributes:
        name: that of its CSV file.
        points: text beside each point, from its y; None: points have none.
    """

    name: str
    title: str
    note: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    points: Callable[[float], str] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """The points, as the CSV file has them, and the levels that they are to be compared with."""
        x, y = self.x.column, self.y.column
        rows: list[dict[str, Any]] = []
        for line in self.lines:
            columns = {x: line.x, y: line.y, f"{y}_least": line.low, f"{y}_largest": line.high}
            known = {name: values for name, values in columns.items() if values is not None}
            for values in zip(*known.values(), strict=True):
                rows.append({"series": line.label, **dict(zip(known, map(float, values), strict=True))})
        levels = [{"series": level.label, y: level.value} for level in self.levels]
        return rows + levels if rows else []
