"""The step over the number of hosts, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from oktopk.replay.links import LinksError, unwritable

NO_MATPLOTLIB = "a picture needs matplotlib, which is not installed: pip install matplotlib"

SUFFIXES = (".svg", ".png")


@dataclass(frozen=True)
class Curve:
    """Seconds of a step over hosts."""

    label: str
    hosts: Sequence[int]
    seconds: Sequence[float]
    dashed: bool = False


def check_picture(path: Path) -> None:
    """Raise LinksError where no picture can be drawn into this file."""
    if find_spec("matplotlib") is None:
        raise LinksError(NO_MATPLOTLIB)
    if path.suffix.lower() not in SUFFIXES:
        endings = " or ".join(SUFFIXES)
        raise LinksError(f"{path} is no picture's name: take one that ends in {endings}")
    if problem := unwritable(path):
        raise LinksError(problem)


def draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write a picture, whose type is that of the path.

    Raises:
        LinksError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for curve in curves:
        style = "--" if curve.dashed else "-"
        milliseconds = [1e3 * each for each in curve.seconds]
        axes.plot(curve.hosts, milliseconds, style, marker="o", markersize=3, label=curve.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([*curves[0].hosts], [str(count) for count in curves[0].hosts])
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("hosts")
    axes.set_ylabel("step, ms")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LinksError(f"{path} cannot be written: {error}") from error
