"""The data of a picture, which jobs.render.draw draws, and how methods look in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Okabe and Ito's palette, but for its yellow, which is too light for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
GREY = "#555555"

OURS = "oktopk"
"""The method that stands out beside others."""

METHODS: dict[str, tuple[str, str, int]] = {
    "dense": ("Dense", COLOURS[6], 0),
    "dense-ovlp": ("DenseOvlp", COLOURS[0], 1),
    "oktopk": ("Ok-Topk", COLOURS[1], 0),
    "oktopk-updates": ("Ok-Topk of updates", "#661100", 2),
    "topka": ("TopkA", COLOURS[2], 0),
    "topkdsa": ("TopkDSA", COLOURS[3], 1),
    "gtopk": ("gTopk", COLOURS[4], 0),
    "gaussiank": ("Gaussiank", COLOURS[5], 2),
    "union": ("Union", "#332288", 3),
    "union-updates": ("Union of updates", "#DDCC77", 1),
    "nccl": ("NCCL", "#999999", 0),
    "ddp": ("DDP", "#882255", 1),
    "powersgd": ("PowerSGD", "#117733", 2),
}
"""Method -> title, colour, which of DASHES; in the order in which they are listed.

Methods that compute the same lie on one line: broken ones let the one below show through.
"""

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelpad": 7,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    # text as outlines, so that it looks the same everywhere, and equal pictures as equal bytes
    "svg.fonttype": "path",
    "svg.hashsalt": "oktopk",
    # a label may be a file's name
    "text.parse_math": False,
}


def title_of(method: str) -> str:
    """Title of a method."""
    return METHODS[method][0] if method in METHODS else method


def colour_of(method: str) -> str:
    """The method's colour in all pictures; grey for one that is not known."""
    return METHODS[method][1] if method in METHODS else GREY


def dashes_of(method: str, before: int = 0) -> Any:
    """Dashes of the method's line; before: number of its lines drawn already."""
    first = METHODS[method][2] if method in METHODS else 0
    return DASHES[(first + before) % len(DASHES)]


def order_of(method: str) -> int:
    """The method's number in a list; unknown ones last."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)


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
        prefixes: numbers have a prefix such as k, whatever their size; else from 10,000 on.
        percent: shares, of which those far below the best are cut off.
    """

    label: str
    column: str
    log: int = 0
    prefixes: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over something; its name is that of its CSV file."""

    name: str
    title: str
    note: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()

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
