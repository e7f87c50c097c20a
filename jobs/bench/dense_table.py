"""Tables and charts of a document of `jobs.bench --table dense`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from jobs.bench.document import Run
from jobs.render.chart import Axis, Chart, Line
from jobs.render.style import COLOURS, colour_of
from jobs.render.table import Block, Column, at, shown, table

MODES = {"graph": "in a CUDA graph", "launched": "launched by the host", "waited": "launched and waited for"}
"""Key of a time -> what it is the time of, for a call."""

_DRAWN = {
    "oktopk, out": ("Ok-Topk", COLOURS[1]),
    "nccl, in": ("NCCL", colour_of("nccl")),
    "torch-one-shot, out": ("torch, one shot", COLOURS[5]),
    "torch-two-shot, in": ("torch, two shots", COLOURS[0]),
}
"""Contestant -> its title and colour."""


def size(nbytes: float) -> str:
    """A number of bytes that is a power of two."""
    return f"{nbytes / 2**20:g} MB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KB"


def dense_table(run: Run) -> list[Block]:
    """Microseconds of a call by length and contestant, for each type and mode; the bandwidth; the errors."""
    parts: list[Block] = [f"{run['ranks']} ranks, {run['device']}, NCCL {run['nccl']}"]
    parts += [f"without {name}: {reason}" for name, reason in run["left_out"].items()]
    if copied := run["floors"].get("copy"):
        parts.append(f"a copy to the next GPU, while all copy: {copied / 1e9:.0f} GB/s")
    if trip := run["floors"].get("round_trip"):
        parts.append(f"a flag to another GPU and back: {1e6 * trip:.2f} us")
    names = list(dict.fromkeys(name for cell in run["cells"] for name in cell["times"]))
    for kind in dict.fromkeys(cell["type"] for cell in run["cells"]):
        cells = [cell for cell in run["cells"] if cell["type"] == kind]
        for mode, meaning in MODES.items():
            columns = [Column("bytes", lambda cell: size(cell["nbytes"]))]
            columns += [Column(name, _microseconds(name, mode)) for name in names]
            columns += [Column("takes", lambda cell: cell["choice"])]
            if mode == "graph":
                columns.append(
                    Column("GB/s", lambda cell: shown(bandwidth(cell, run["ranks"]), "{:.0f}", 1e-9))
                )
            parts += [f"{kind}, us of a call {meaning}", table(columns, cells, align=("right", "right"))]
        errors = ", ".join(f"{name} {error:.2g}" for name, error in run["errors"][kind].items())
        parts.append(f"{kind}, error against float64: {errors}")
    return parts


def bandwidth(cell: Run, ranks: int) -> float | None:
    """Bus bandwidth of Ok-Topk's call, in bytes per second: as nccl-tests derive it, 2(P-1)/P times the vector in its time."""
    seconds = at(cell["times"].get("oktopk, out"), "graph")
    return None if seconds is None else 2 * (ranks - 1) / ranks * cell["nbytes"] / seconds


def _microseconds(name: str, mode: str) -> Callable[[Run], str]:
    return lambda cell: shown(at(cell["times"].get(name), mode), "{:.1f}", 1e6)


def dense_charts(run: Run) -> list[Chart]:
    """Microseconds of a call in a CUDA graph over the length, a chart for each type."""
    charts = []

    def tick(nbytes: float) -> str:
        return size(nbytes) if round(math.log2(nbytes)) % 4 == 0 else ""

    sizes = Axis("vector", "bytes", log=2, form=tick, each=True)
    times = Axis("µs of a call in a CUDA graph", "seconds", log=10, form=lambda seconds: f"{1e6 * seconds:g}")
    for kind in dict.fromkeys(cell["type"] for cell in run["cells"]):
        lines = []
        for name, (label, colour) in _DRAWN.items():
            points = [
                (cell["nbytes"], cell["times"][name]["graph"])
                for cell in run["cells"]
                if cell["type"] == kind and at(cell["times"].get(name), "graph") is not None
            ]
            if points:
                x, y = np.array(points, np.float64).T
                lines.append(Line(label, x, y, colour=colour, marker="o", ours=name == "oktopk, out"))
        charts.append(Chart(f"dense-{kind}", kind, "", sizes, times, tuple(lines)))
    return charts
