"""Draws what a step's time is made of, on this host and between hosts on slow links."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from jobs.render.style import COLOURS, OURS
from jobs.report.draw import PAGE, WIDTH
from jobs.report.groups import Group
from jobs.report.panels import DrawnPanel


def step_bars(here: Sequence[Group], slow: Sequence[Group], rate: str) -> DrawnPanel | None:
    """A bar of a step's mean time for each method and place; None where no run over slow links is complete.

    Args:
        here: groups of runs on this host; slow: between hosts on links of `rate`.
        rate: with its unit.
    """
    places = {"one host": _both(here), rate: _both(slow)}
    if not places[rate]:
        return None
    points: list[dict[str, Any]] = []
    for where, groups in places.items():
        for group in groups:
            step, reduction = (group.mean(f"{name}_seconds") or 0.0 for name in ("step", "reduction"))
            times = {"compute_seconds": step - reduction, "reduction_seconds": reduction}
            points.append({"series": f"{group.label}, {where}", "method": group.method, **times})
    text = io.StringIO()
    with mpl.rc_context(PAGE):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        axes = figure.subplots()
        for place, point in enumerate(reversed(points)):
            compute, reduction = (1e3 * point[f"{part}_seconds"] for part in ("compute", "reduction"))
            colour = COLOURS[1] if point["method"] == OURS else COLOURS[6]
            axes.barh(place, compute, color=colour, alpha=0.3)
            axes.barh(place, reduction, left=compute, color=colour)
            axes.annotate(
                f"{compute:.0f} + {reduction:.0f} ms",
                (compute + reduction, place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(points)), [point["series"] for point in reversed(points)])
        axes.margins(x=0.3)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("mean step, ms")
        figure.savefig(text, format="svg", metadata={"Date": None})
    title, note = f"Time of a step on one host and over {rate}", "pale: computation; dark: reduction"
    return DrawnPanel("step-times", title, note, text.getvalue(), tuple(points))


def _both(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.method in ("dense", OURS) and group.counted[0].complete]
