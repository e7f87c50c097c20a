"""Titles and looks of the bench's rows in pictures; draws documents of sweeps over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jobs.bench.document import HOST_ROWS, BenchError, Run, read
from jobs.bench.tables import BUSIER, document_tables
from jobs.render.chart import Axis, Chart, Line, Picture
from jobs.render.draw import save
from jobs.render.style import COLOURS, DASHES, OURS, colour_of, title_of

TITLES = {
    "mpi": "MPI's own",
    "mpi-ring": "MPI's ring",
    "mpi-rabenseifner": "MPI's Rabenseifner",
    "nccl": "NCCL fp32",
    "nccl-bf16": "NCCL bf16",
    "oktopk-mpi": "Ok-Topk, MPI alone",
}
"""Of rows that are no method; those of methods are in jobs.render.style."""
_WIRES = dict(
    zip(("plain", "float32", "bfloat16", "int8", "int4"), (COLOURS[i] for i in (5, 0, 2, 4, 3)), strict=True)
)
_MARKERS = "osD^vXP"


def look(name: str) -> dict[str, Any]:
    """Label, colour, dashes of a row's line, and whether it is Ok-Topk's, as `Line` takes them."""
    if name in HOST_ROWS:
        levels, wire = HOST_ROWS[name]["levels"], HOST_ROWS[name]["wire"]
        label = f"{'two levels' if levels == 'hosts' else 'flat'}, {wire}"
        return {"label": label, "colour": _WIRES[str(wire)], "dashes": DASHES[levels == "flat"]}
    colour = colour_of("dense" if name.startswith("mpi") else name.removesuffix("-bf16"))
    label = TITLES.get(name) or title_of(name)
    return {"label": label, "colour": colour, "dashes": DASHES[name == "nccl-bf16"], "ours": name == OURS}


def draw(picture: Picture, output: Path) -> None:
    """As `jobs.render.draw.save`. Raises BenchError: the file cannot be written."""
    try:
        save(picture, output)
    except (OSError, ValueError) as error:
        raise BenchError(f"{output} cannot be written: {error}") from error


def report_bench(path: str | Path, folder: str | Path) -> str:
    """The tables of a document; a sweep is also drawn, into STEM.png in a folder, made if need be.

    Raises:
        BenchError: the JSON cannot be read or is none of the bench's, or the folder cannot be written.
    """
    content = read(path)
    tables = document_tables(content)
    if content["kind"] != "sweep":
        return tables
    picture = Path(folder) / f"{Path(path).stem}.png"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder} cannot be written: {error.strerror or error}") from error
    draw(sweep_chart(content), picture)
    return f"{tables}\n\npicture: {picture}"


def sweep_chart(content: Run) -> Chart:
    """Words per rank of every method against P, between both bounds."""
    runs, machine, commit = content["runs"], content["machine"], content["commit"] or "unknown"
    ranks = np.array([run["ranks"] for run in runs], np.float64)
    lines = []
    for name, bound in (("2k(P−1)/P", "lower"), ("6k(P−1)/P", "upper")):
        lines.append(Line(name, ranks, np.array([run["bounds"][bound] for run in runs]), dashes=":"))
    names = dict.fromkeys(method["name"] for run in runs for method in run["methods"])
    for number, name in enumerate(names):
        words = [{m["name"]: m["words"] for m in run["methods"]}.get(name, {}) for run in runs]
        mean, busiest = (np.array([each.get(k, np.nan) for each in words]) for k in ("mean", "busiest"))
        line = Line(x=ranks, y=mean, marker=_MARKERS[number % len(_MARKERS)], **look(name))
        lines.append(line)
        if np.nanmax(busiest / np.maximum(mean, 1e-9)) > BUSIER:
            label = f"{line.label}, busiest rank"
            lines.append(Line(label, ranks, busiest, colour=line.colour, dashes=":", marker=line.marker))
    parts = [
        f"n = {runs[0]['length']:,}, density {runs[0]['density']:g}, {runs[0]['gradients']['name']} gradients",
        f"{machine['cpu']}, {machine['cores']} cores",
        f"commit {commit[:10]}{' with changes' if content['dirty'] else ''}, {content['date'][:10]}",
    ]
    return Chart(
        "words-over-ranks",
        "Words that a rank sends in a step, against the number of ranks",
        " · ".join(parts),
        Axis("ranks", "ranks", log=2, each=True),
        Axis("words per rank and step", "words", log=10, prefixes=True),
        tuple(lines),
    )
