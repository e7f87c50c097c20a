"""Draws bench documents, and writes them as CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.artist
import matplotlib.lines
import matplotlib.patches
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullFormatter, NullLocator, ScalarFormatter

from jobs.bench.dense_table import draw_dense
from jobs.bench.document import BenchError, read
from jobs.bench.format import cell_title, ordered
from jobs.bench.tables import BUSIER, document_tables, reference
from jobs.report.panels import write_rows
from jobs.report.style import GREY, STAGES, STYLE, colour_of, title_of

TITLES = {
    "mpi": "MPI's own",
    "mpi-ring": "MPI's ring",
    "mpi-rabenseifner": "MPI's Rabenseifner",
    "nccl": "NCCL fp32",
    "nccl-bf16": "NCCL bf16",
    "oktopk-mpi": "Ok-Topk, MPI alone",
    "oktopk-into-g": "Ok-Topk into g",
}
"""Of rows that are no method; those of methods are in jobs.report.style."""
MARKERS = {"oktopk": "o", "dense": "s", "topka": "D", "topkdsa": "^", "gtopk": "v", "gaussiank": "X"}
"""Of methods' lines."""
LABEL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}


def draw(path: str | Path, folder: str | Path) -> list[Path]:
    """Draw a document into STEM.png in a folder, made if need be; all but the dense table also into two CSV files.

    Raises:
        BenchError: the JSON cannot be read, is none of the bench's or one that is not drawn, or the folder cannot be written.
    """
    content = read(path)
    if content["kind"] in ("hook table", "rows table"):
        raise BenchError(f"{path} has no picture: python -m jobs.bench.tables prints it")
    target, stem = Path(folder), Path(path).stem
    dense = content["kind"] == "dense table"
    files = [target / f"{stem}.png"]
    files += [] if dense else [target / f"{stem}-methods.csv", target / f"{stem}-stages.csv"]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            (draw_dense(content["runs"][0]) if dense else _picture(content)).savefig(files[0], dpi=120)
        if not dense:
            write_rows(method_rows(content), files[1])
            write_rows(stage_rows(content), files[2])
    except OSError as error:
        raise BenchError(f"{folder} cannot be written: {error.strerror}") from error
    return files


def report_bench(path: str | Path, folder: str | Path) -> str:
    """Draw a document; returns its tables, and the picture's name below them. Raises BenchError as `draw`."""
    picture = draw(path, folder)[0]
    content = read(path)
    return f"{document_tables(content)}\n\npicture: {picture}"


def _picture(content: dict[str, Any]) -> Figure:
    runs = content["runs"]
    if content["kind"] == "sweep":
        figure = Figure(figsize=(9.5, 6.2), layout="constrained")
        _draw_sweep(figure.subplots(), runs)
    else:
        most = max(len(run["methods"]) for run in runs)
        figure = Figure(figsize=(15, 1.9 + (1.3 + 0.5 * most) * len(runs)), layout="constrained")
        rows = figure.subplots(len(runs), 2, squeeze=False)
        for (times, volume), run in zip(rows, runs, strict=True):
            _draw_times(times, run)
            _draw_volume(volume, run)
        _stage_legend(figure, runs)
    figure.suptitle(_caption(content), fontsize=10, color=GREY)
    return figure


def _caption(content: dict[str, Any]) -> str:
    run, commit = content["runs"][0], content["commit"] or "unknown"
    machine = content["machine"]
    gpu = content.get("gpu")
    where = (
        f"{machine['cpu']}, {machine['cores']} cores" if gpu is None else f"{gpu['count']} x {gpu['name']}"
    )
    what = f"n = {run['length']:,}, density {run['density']:g}, "
    several = content["kind"] == "gpu table" or len({run["length"] for run in content["runs"]}) > 1
    parts = [
        ("" if several else what) + f"{run['gradients']['name']} gradients",
        where + (f", {run['network']}" if run["network"] else ""),
        f"commit {commit[:10]}{' with changes' if content['dirty'] else ''}, {content['date'][:10]}",
    ]
    return " · ".join(parts)


def _title(name: str) -> str:
    return TITLES.get(name) or title_of(name)


def _draw_times(axes: Axes, run: dict[str, Any]) -> None:
    """A bar of stages per method and kind of step, a mark for the mean of all steps."""
    cell = f", {cell_title(run)}" if run.get("device") == "cuda" else ""
    axes.set_title(f"Time of a step, {run['ranks']} ranks{cell}")
    axes.set_xlabel("ms; wide: regular steps, narrow: exact ones, by stage, mean over ranks")
    methods = run["methods"]
    for row, method in enumerate(methods):
        for kind, offset, height in (("regular", -0.12, 0.46), ("exact", 0.26, 0.2)):
            left = 0.0
            stages = method["stages"][kind] or {}
            for stage in ordered(stages):
                width = stages[stage]["mean"] * 1e3
                look: dict[str, Any] = {
                    "color": STAGES.get(stage, GREY),
                    "edgecolor": "white",
                    "linewidth": 0.4,
                }
                axes.barh(row + offset, width, height, left=left, **look)
                left += width
        mean = method["seconds"]["all"]["mean"] * 1e3
        axes.plot([mean, mean], [row - 0.42, row + 0.4], color="black", linewidth=1.6)
        text = f"{mean:.0f}" if mean >= 1000 else f"{mean:.3g}"
        box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
        axes.annotate(text, (mean, row - 0.12), xytext=(4, 0), va="center", bbox=box, **LABEL)
    axes.set_yticks(range(len(methods)), [_title(method["name"]) for method in methods])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    against = reference(methods, run.get("baseline"))
    if against is not None:
        axes.axvline(against["seconds"]["all"]["mean"] * 1e3, color=GREY, linestyle=":", linewidth=1.2)


def _stage_legend(figure: Figure, runs: Sequence[dict[str, Any]]) -> None:
    methods = [method for run in runs for method in run["methods"]]
    found = {stage for method in methods for kind in method["stages"].values() for stage in kind or {}}
    handles: list[mpl.artist.Artist] = [
        mpl.patches.Patch(color=colour) for stage, colour in STAGES.items() if stage in found
    ]
    labels = [stage for stage in STAGES if stage in found]
    handles.append(mpl.lines.Line2D([], [], color="black", linewidth=1.6))
    labels.append("mean of all steps, slowest rank")
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=10)


def _draw_volume(axes: Axes, run: dict[str, Any]) -> None:
    """Words counted, mean and busiest rank, over the range that the formula gives."""
    axes.set_title("Words that a rank sends in a step")
    axes.set_xlabel("words; dot: mean over ranks, triangle: busiest rank, grey: by formula")
    methods = run["methods"]
    for row, method in enumerate(methods):
        formula, words = method["formulas"], method["words"]
        least, most = formula["least"], formula["most"]
        axes.plot([least, most], [row, row], color="#cccccc", linewidth=9, solid_capstyle="butt")
        for end in {least, most}:
            axes.plot([end, end], [row - 0.3, row + 0.3], color="#999999", linewidth=1.5)
        if not method["counted"]:
            continue
        axes.plot(words["mean"], row, "o", color="#0072B2", markersize=7)
        if words["busiest"] > BUSIER * words["mean"]:
            axes.plot(words["busiest"], row, ">", color="#D55E00", markersize=7)
        text = EngFormatter(places=1, sep="")(words["mean"])
        box = {"boxstyle": "square,pad=0.05", "facecolor": "white", "linewidth": 0}
        axes.annotate(text, (words["mean"], row), xytext=(0, 9), ha="center", bbox=box, **LABEL)
    if run["ranks"] > 1:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        low, high = axes.get_xlim()
        axes.xaxis.set_minor_formatter(EngFormatter(sep="") if high < 10 * low else NullFormatter())
    axes.set_yticks(range(len(methods)), [_title(method["name"]) for method in methods])
    axes.set_ylim(len(methods) - 0.4, -0.7)
    axes.grid(axis="y", visible=False)


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


def method_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per run and method: the single figures. Seconds, words."""
    rows = []
    for run in content["runs"]:
        for method in run["methods"]:
            row: dict[str, Any] = {name: run[name] for name in ("ranks", "length", "density", "k")}
            row |= {"name": method["name"], "method": method["method"], "counted": method["counted"]}
            for kind, seconds in method["seconds"].items():
                row |= {f"{kind}_{name}": value for name, value in (seconds or {}).items()}
            for name in ("words", "messages", "control_words", "control_messages"):
                row |= {f"{name}_{which}": value for which, value in method[name].items()}
            row |= {f"formula_{which}": value for which, value in method["formulas"].items()}
            rows.append(row | {f"nnz_{which}": value for which, value in method["nnz"].items()})
    return rows


def stage_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per run, method, kind of step and stage. Seconds."""
    return [
        {"ranks": run["ranks"], "name": method["name"], "kind": kind, "stage": stage}
        | seconds
        | {"floor": method["floors"].get(stage, {}).get("seconds", "")}
        for run in content["runs"]
        for method in run["methods"]
        for kind, stages in method["stages"].items()
        for stage, seconds in (stages or {}).items()
    ]
