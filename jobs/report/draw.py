"""Draws panels as SVG for the page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jobs.render.style import GREY, STYLE
from jobs.report.groups import stands_out
from jobs.report.panels import DrawnPanel, Level, LinePanel, Picture

# Inches. On a telephone a picture shrinks to 0.65 of this: letters of 12 points stay readable.
WIDTH, HEIGHT = 5.8, 4.1
LEGEND_CHARACTERS = 48  # fit into one of its lines at WIDTH
ACCURACY_SHOWN = 0.3  # below the best
LABEL_ROOM = 0.055  # of the axes' height that the label of a level needs
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g}%")
LABEL: dict[str, Any] = {"va": "center", "fontsize": "small", "color": GREY}
PAGE: dict[Any, Any] = {**STYLE, "font.size": 12, "legend.fontsize": 11, "axes.labelsize": 12}


def svg(panel: Picture) -> str:
    """One panel with its legend, as an SVG document without a title: the page has that."""
    if isinstance(panel, DrawnPanel):
        return panel.document
    with mpl.rc_context(PAGE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        draw(axes, panel)
        _legend(figure, axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()


def draw(axes: Axes, panel: LinePanel) -> None:
    """Draw one panel without its title, which the page has, and its legend."""
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    for line in panel.lines:
        group = line.group
        ours = stands_out(group, [each.group for each in panel.lines])
        mark = "o" if panel.marks and len(line.x) <= 12 else None
        width, order = (2.6, 3) if ours else (1.6, 2)
        look: dict[str, Any] = {"linestyle": group.dashes, "marker": mark, "markersize": 4, "zorder": order}
        axes.plot(line.x, line.y, color=group.colour, linewidth=width, label=group.label, **look)
        if np.any(line.high > line.low):
            axes.fill_between(line.x, line.low, line.high, color=group.colour, alpha=0.18, linewidth=0)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    for level in panel.levels:
        axes.axhline(level.value, color=GREY, linestyle=":", linewidth=1.3)
    _count(axes, panel)
    _name_levels(axes, panel.levels)


def _count(axes: Axes, panel: LinePanel) -> None:
    """Ticks in the units that a reader thinks in."""
    largest = max(float(line.x[-1]) for line in panel.lines)
    if panel.log_x or largest >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if panel.log_x:
            low, high = np.log10(axes.get_xlim())
            few = np.floor(high) - np.ceil(low) < 1  # not two powers of ten to tell the scale by
            axes.xaxis.set_minor_formatter(EngFormatter(sep="") if few else NullFormatter())
            if few:
                axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    if not panel.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=panel.columns[0] == "step"))
    if panel.percent:
        # what tells methods apart is how they end, not that they began at chance
        best = max(float(line.y.max()) for line in panel.lines)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], best - ACCURACY_SHOWN))
        axes.yaxis.set_major_formatter(PERCENT)
    elif panel.columns[1] == "words" or max(float(line.y.max()) for line in panel.lines) >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        if panel.log_y:
            axes.yaxis.set_minor_formatter(NullFormatter())


def _name_levels(axes: Axes, levels: Sequence[Level]) -> None:
    """Name dotted lines at the right of the axes, where no curve runs; the limits are set."""
    low, high = axes.get_ylim()
    transform = axes.transData
    bottom, top = (float(transform.transform((0, value))[1]) for value in (low, high))
    lowest = -1.0
    for level in sorted(levels, key=lambda level: level.value):
        # a label gives way to the one below it
        height = (float(transform.transform((axes.get_xlim()[0], level.value))[1]) - bottom) / (top - bottom)
        lowest = max(height, lowest + LABEL_ROOM)
        axes.annotate(
            level.label, (1.01, lowest), xycoords="axes fraction", ha="left", annotation_clip=False, **LABEL
        )


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    columns = max(1, min(len(labels), LEGEND_CHARACTERS // (max(map(len, labels)) + 4)))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, frameon=False, columnspacing=1.4
    )
