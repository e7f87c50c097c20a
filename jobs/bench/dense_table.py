"""Tables and the picture of a document of `jobs.bench --table dense`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from jobs.bench.document import Run
from jobs.render.table import Block, Column, at, shown, table

MODES = {"graph": "in a CUDA graph", "launched": "launched by the host", "waited": "launched and waited for"}
"""Key of a time -> what it is the time of, for a call."""

_DRAWN = {
    "oktopk, out": "Ok-Topk",
    "int8, out": "Ok-Topk, elements as bytes",
    "nccl, in": "NCCL",
    "torch-one-shot, out": "torch, one shot",
    "torch-two-shot, in": "torch, two shots",
}


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


def draw_dense(run: Run) -> Figure:
    """Microseconds of a call in a CUDA graph over the length, a panel for each type."""
    kinds = list(dict.fromkeys(cell["type"] for cell in run["cells"]))
    figure = Figure(figsize=(5.2 * len(kinds), 4.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for name, label in _DRAWN.items():
            points: list[tuple[Any, Any]] = [
                (cell["nbytes"], 1e6 * cell["times"][name]["graph"])
                for cell in run["cells"]
                if cell["type"] == kind and at(cell["times"].get(name), "graph") is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator([4096 << i for i in range(0, 17, 4)]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: size(nbytes)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
        axes.set(title=kind, xlabel="vector", ylabel="µs of a call in a CUDA graph")
        axes.legend(frameon=False)
    figure.suptitle(f"Dense allreduce, {run['ranks']} GPUs ({run['device']})", fontsize=10)
    return figure
