"""Draws the documents of a sweep over ranks and of dense allreduces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, ScalarFormatter

from data.durable import replaced
from jobs.bench.dense_table import draw_dense
from jobs.bench.document import BenchError, read
from jobs.bench.tables import BUSIER, document_tables
from jobs.render.style import GREY, STYLE, colour_of, title_of

TITLES = {
    "mpi": "MPI's own",
    "mpi-ring": "MPI's ring",
    "mpi-rabenseifner": "MPI's Rabenseifner",
    "nccl": "NCCL fp32",
    "nccl-bf16": "NCCL bf16",
    "oktopk-mpi": "Ok-Topk, MPI alone",
    "oktopk-into-g": "Ok-Topk into g",
}
"""Of rows that are no method; those of methods are in jobs.render.style."""
MARKERS = {
    "oktopk": "o",
    "dense": "s",
    "topka": "D",
    "topkdsa": "^",
    "gtopk": "v",
    "gaussiank": "X",
    "union": "P",
}
"""Of methods' lines."""


def report_bench(path: str | Path, folder: str | Path) -> str:
    """The tables of a document; a sweep and dense allreduces are also drawn, into STEM.png in a folder, made if need be.

    Raises:
        BenchError: the JSON cannot be read or is none of the bench's, or the folder cannot be written.
    """
    content = read(path)
    tables, draw = document_tables(content), _PICTURES.get(content["kind"])
    if draw is None:
        return tables
    picture = Path(folder) / f"{Path(path).stem}.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE), replaced(picture) as draft:
            draw(content).savefig(draft, format="png", dpi=120)
    except OSError as error:
        raise BenchError(f"{folder} cannot be written: {error.strerror or error}") from error
    return f"{tables}\n\npicture: {picture}"


def _sweep_picture(content: dict[str, Any]) -> Figure:
    run, machine, commit = content["runs"][0], content["machine"], content["commit"] or "unknown"
    figure = Figure(figsize=(9.5, 6.2), layout="constrained")
    _draw_sweep(figure.subplots(), content["runs"])
    parts = [
        f"n = {run['length']:,}, density {run['density']:g}, {run['gradients']['name']} gradients",
        f"{machine['cpu']}, {machine['cores']} cores",
        f"commit {commit[:10]}{' with changes' if content['dirty'] else ''}, {content['date'][:10]}",
    ]
    figure.suptitle(" · ".join(parts), fontsize=10, color=GREY)
    return figure


def _title(name: str) -> str:
    return TITLES.get(name) or title_of(name)


def _draw_sweep(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    """Words per rank of every method against P, between both bounds."""
    ranks = [run["ranks"] for run in runs]
    axes.set_title("Words that a rank sends in a step, against the number of ranks")
    axes.set_xlabel("ranks")
    axes.set_ylabel("words per rank and step")
    lower, upper = ([run["bounds"][name] for run in runs] for name in ("lower", "upper"))
    axes.fill_between(ranks, lower, upper, color="#dddddd", linewidth=0, label="2k(P−1)/P … 6k(P−1)/P")
    names = list(dict.fromkeys(method["name"] for run in runs for method in run["methods"]))
    for i, name in enumerate(names):
        words = [{m["name"]: m["words"] for m in run["methods"]}.get(name, {}) for run in runs]
        mean, busiest = (np.array([each.get(k, np.nan) for each in words]) for k in ("mean", "busiest"))
        # Ok-Topk and gTopk's mean coincide: a wide line shows from under a narrow one
        width = 3.5 if name == "oktopk" else 1.6
        look: dict[str, Any] = {
            "color": colour_of(name),
            "marker": MARKERS.get(name, "."),
            "zorder": 2 + 0.01 * i,
        }
        axes.plot(ranks, mean, label=_title(name), linewidth=width, **look)
        if np.nanmax(busiest / np.maximum(mean, 1e-9)) > BUSIER:
            label = f"{_title(name)}, busiest rank"
            axes.plot(ranks, busiest, label=label, markerfacecolor="white", linestyle=":", **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


_PICTURES = {"sweep": _sweep_picture, "dense table": lambda content: draw_dense(content["runs"][0])}
"""Kind of a document -> its picture."""
