"""Draws charts: as SVG for a page, and into a file."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as AnyAxis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
)

from data.durable import replaced
from jobs.render.chart import GREY, STYLE, Axis, Chart, Level

# Inches. On a telephone a picture shrinks to 0.65 of this: letters of 12 points stay readable.
WIDTH, HEIGHT = 5.8, 4.1
FILE_WIDTH = 7.2  # of a picture that is a file of its own
LEGEND_HEIGHT = 0.24
LEGEND_LINES = 3  # fit below a picture of HEIGHT
CHARACTERS = 8.3  # of a legend, that fit into an inch
NOTE_CHARACTERS = 13.0
ACCURACY_SHOWN = 0.3  # below the best
LABEL_ROOM = 0.055  # of the axes' height that the label of a level needs
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")
LABEL: dict[str, Any] = {"va": "center", "ha": "left", "fontsize": "small", "color": GREY}
LABEL |= {"xycoords": ("axes fraction", "data"), "textcoords": "axes fraction", "annotation_clip": False}
PAGE: dict[Any, Any] = {**STYLE, "font.size": 12, "legend.fontsize": 11, "axes.labelsize": 12}


def svg(chart: Chart) -> str:
    """One chart with its legend, as an SVG document without a title: the page has that."""
    text = io.StringIO()
    with mpl.rc_context(PAGE):
        figure, _ = plotted(chart, WIDTH)
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def write(figure: Figure, axes: Axes, title: str, note: str, output: Path) -> None:
    """Write a figure of FILE_WIDTH below a title and a note, in the style of PAGE, into a file; its suffix is the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: no such format.
    """
    form = output.suffix.removeprefix(".")
    with replaced(output) as draft:
        axes.set_title(title)
        lines = textwrap.wrap(note, int(NOTE_CHARACTERS * FILE_WIDTH))
        figure.suptitle("\n".join(lines), fontsize=10, color=GREY)
        figure.savefig(draft, format=form, dpi=120, metadata={"Date": None} if form == "svg" else None)


def plotted(chart: Chart, width: float) -> tuple[Figure, Axes]:
    """A chart without its title, above its legend."""
    figure = Figure(figsize=(width, HEIGHT), layout="constrained")
    axes = figure.subplots()
    draw(axes, chart)
    _legend(figure, axes)
    return figure, axes


def draw(axes: Axes, chart: Chart) -> None:
    """Draw a chart without its title and its legend."""
    axes.set_xlabel(chart.x.label)
    axes.set_ylabel(chart.y.label)
    for line in chart.lines:
        wide = line.ours and not all(other.ours for other in chart.lines)
        width, order = (2.6, 3) if wide else (1.6, 2)
        look: dict[str, Any] = {
            "linestyle": line.dashes,
            "marker": line.marker,
            "markersize": 4,
            "zorder": order,
        }
        axes.plot(line.x, line.y, color=line.colour, linewidth=width, label=line.label, **look)
        if line.low is not None and line.high is not None and np.any(line.high > line.low):
            axes.fill_between(line.x, line.low, line.high, color=line.colour, alpha=0.18, linewidth=0)
    if chart.x.log:
        axes.set_xscale("log", base=chart.x.log)
    if chart.y.log:
        axes.set_yscale("log", base=chart.y.log)
    for level in chart.levels:
        axes.axhline(level.value, color=GREY, linestyle=":", linewidth=1.3)
    _count(axes.xaxis, chart.x, axes.get_xlim(), max(float(np.max(line.x)) for line in chart.lines))
    if not chart.x.log:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=chart.x.column == "step"))
    largest = max(float(np.nanmax(line.y)) for line in chart.lines)
    if chart.y.percent:
        # what tells methods apart is how they end, not that they began at chance
        axes.set_ylim(bottom=max(axes.get_ylim()[0], largest - ACCURACY_SHOWN))
    _count(axes.yaxis, chart.y, axes.get_ylim(), largest)
    _name_levels(axes, chart.levels)


def _count(ticks: AnyAxis, axis: Axis, limits: tuple[float, float], largest: float) -> None:
    """Ticks in the units that a reader thinks in, two of them at least."""
    if axis.prefixes or largest >= 10_000:
        formatter: Formatter = EngFormatter(sep="")
    elif axis.percent:
        formatter = PERCENT
    elif axis.log:
        formatter = FuncFormatter(lambda value, _: f"{value:g}")  # matplotlib's own writes mathematics
    else:
        return
    ticks.set_major_formatter(formatter)
    if axis.log:
        low, high = np.log10(limits)
        few = np.floor(high) - np.ceil(low) < 1  # not two powers of ten to tell the scale by
        ticks.set_minor_formatter(formatter if few else NullFormatter())
        if few:
            ticks.set_minor_locator(LogLocator(subs=(2, 5)))


def _name_levels(axes: Axes, levels: Sequence[Level]) -> None:
    """Name dotted lines at the right of the axes, where no curve runs; the limits are set."""
    left, to_axes, lowest = axes.get_xlim()[0], axes.transData + axes.transAxes.inverted(), -1.0
    for level in sorted(levels, key=lambda level: level.value):
        # a label gives way to the one below it
        lowest = max(to_axes.transform((left, level.value))[1], lowest + LABEL_ROOM)
        axes.annotate(level.label, (1.01, level.value), (1.01, lowest), **LABEL)


def _legend(figure: Figure, axes: Axes) -> None:
    """The legend below the axes; a picture with a long one is higher."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int(CHARACTERS * width) // (max(map(len, labels)) + 4)))
    further = max(0, math.ceil(len(labels) / columns) - LEGEND_LINES)
    figure.set_size_inches(width, height + LEGEND_HEIGHT * further)
    look: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "columnspacing": 1.4}
    figure.legend(handles, labels, ncols=columns, handlelength=3.0, **look)
