"""What the bench prints: times, traffic, stages beside their floors, memory; of a sweep, words.

    python -m jobs.bench.tables FILE.json                   the tables of a document again
    python -m jobs.bench.tables FILE.json --into README.md

The second puts them between the lines <!-- FILE.json --> and <!-- end of FILE.json -->.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from jobs.bench.document import BenchError, read
from jobs.bench.format import MISSING, ordered, table
from jobs.bench.gpu.markdown import gpu_tables

REFERENCES = ("mpi", "mpi-rabenseifner", "mpi-ring", "dense", "full")
"""What times are compared with: the first of these that takes part; "full" is an ablation's Ok-Topk as it is."""

BUSIER = 1.1
"""The busiest rank is worth a word, or a line, when it sends this times the mean."""


def run_tables(run: dict[str, Any]) -> str:
    """All tables of one run of a document, with a heading."""
    gradients = run["gradients"]["name"]
    heading = (
        f"{run['ranks']} ranks, n = {run['length']:,}, density {run['density']:g}, k = {run['k']:,}, "
        f"{gradients} gradients, {run['course']['steps']} steps after {run['course']['warmup']} discarded"
    )
    methods = run["methods"]
    on_gpu = run.get("device") == "cuda"
    heading += f", {run['gradient_type']} on {run['device']}" if on_gpu else ""
    heading += "".join(f"\nwithout {name}: {reason}" for name, reason in run.get("left_out", {}).items())
    digits = 4 if on_gpu else 2
    times = times_table(methods, run.get("baseline"), digits)
    tables = [heading, times, traffic_table(methods), stages_table(methods, digits)]
    if any(method["memory"]["regular"] for method in methods):
        tables.append(memory_table(methods))
    return "\n\n".join(tables)


def reference(methods: list[dict[str, Any]], baseline: str | None = None) -> dict[str, Any] | None:
    """The entry that times are compared with, None if there is none. `baseline` is a name that goes before all others."""
    by_name = {method["name"]: method for method in methods}
    names = (*([] if baseline is None else [baseline]), *REFERENCES)
    return next((by_name[name] for name in names if name in by_name), None)


def times_table(methods: list[dict[str, Any]], baseline: str | None = None, digits: int = 2) -> str:
    """Milliseconds of a step, slowest rank."""
    against = reference(methods, baseline)
    rows = []
    for method in methods:
        seconds = method["seconds"]
        regular, exact = seconds["regular"], seconds["exact"]
        ratio = None
        if against is not None:
            ratio = seconds["all"]["mean"] / against["seconds"]["all"]["mean"]
        rows.append(
            [
                method["name"],
                _ms(seconds["all"], "mean", digits),
                _ms(seconds["all"], "median", digits),
                _ms(regular, "mean", digits),
                _ms(regular, "median", digits),
                _ms(exact, "mean", digits),
                _ms(exact, "median", digits),
                MISSING if not (regular and exact) else f"{exact['mean'] / regular['mean']:.2f}",
                MISSING if ratio is None else f"{ratio:.2f}",
            ]
        )
    headers = ["step, ms", "mean", "median", "regular: mean", "median", "exact: mean", "median"]
    name = against["name"] if against else "dense"
    return table(rows, [*headers, "exact / regular", f"mean / {name}'s"])


def traffic_table(methods: list[dict[str, Any]]) -> str:
    """Words and messages that a rank sends in a step, and entries."""
    rows = []
    for method in methods:
        formula, words, nnz = method["formulas"], method["words"], method["nnz"]
        least, most = f"{formula['least']:,.0f}", f"{formula['most']:,.0f}"
        counted = method["counted"]
        rows.append(
            [
                method["name"],
                f"{words['mean']:,.0f}" if counted else "not counted",
                f"{words['busiest']:,.0f}" if counted else MISSING,
                least if least == most else f"{least} … {most}",
                f"{method['control_words']['mean']:,.0f}" if counted else MISSING,
                f"{method['messages']['mean']:.1f}" if counted else MISSING,
                f"{method['control_messages']['mean']:.1f}" if counted else MISSING,
                f"{nnz['local']:,.0f}",
                f"{nnz['global']:,.0f}",
                f"{nnz['local_deviation']:.2%}",
                MISSING if nnz["global_deviation"] is None else f"{nnz['global_deviation']:.2%}",
            ]
        )
    headers = ["words per rank", "mean", "busiest", "by formula", "control", "messages", "control"]
    return table(rows, [*headers, "selected", "applied", "|selected/k − 1|", "|applied/k − 1|"])


def stages_table(methods: list[dict[str, Any]], digits: int = 2) -> str:
    """Milliseconds of each stage: mean over the ranks / the rank that took least, and in brackets the floor."""
    blocks = []
    for kind in ("regular", "exact"):
        stages = dict.fromkeys(stage for method in methods for stage in method["stages"][kind] or {})
        if not stages:
            continue
        rows = []
        for stage in ordered(stages):
            cells = []
            for method in methods:
                found = (method["stages"][kind] or {}).get(stage)
                floor = method["floors"].get(stage)
                cell = MISSING
                if found is not None:
                    cell = f"{found['mean'] * 1e3:.{digits}f} / {found['least'] * 1e3:.{digits}f}"
                    cell += "" if floor is None else f" ({floor['seconds'] * 1e3:.{digits}f})"
                cells.append(cell)
            rows.append([stage, *cells])
        title = f"{kind} steps, ms: mean / least rank (floor)"
        blocks.append(table(rows, [title, *(method["name"] for method in methods)]))
    return "\n\n".join(blocks)


def memory_table(methods: list[dict[str, Any]]) -> str:
    """Megabytes kept between steps, and taken on top within one."""
    rows = []
    for method in methods:
        memory = method["memory"]
        held = memory["held"]
        row = [method["name"], *(f"{held[kind] / 1e6:.2f}" for kind in ("update", "residual", "scratch"))]
        for kind in ("regular", "exact"):
            growth = memory[kind]
            row.append(MISSING if growth is None else f"{growth['allocated'] / 1e6:.3f}")
            resident = None if growth is None else growth["resident"]
            row.append(MISSING if resident is None else f"{resident / 1e6:.2f}")
        watched = [memory[kind] for kind in ("regular", "exact") if memory[kind] is not None]
        row.append(
            MISSING if not watched else "yes" if any(growth["n_sized"] for growth in watched) else "no"
        )
        rows.append(row)
    headers = ["MB kept", "update", "residual", "scratch", "regular: allocated", "process grew"]
    return table(rows, [*headers, "exact: allocated", "process grew", "n-sized"])


def sweep_table(runs: Sequence[dict[str, Any]]) -> str:
    """Words per rank and step against the number of ranks; the busiest rank in brackets where it differs."""
    names = list(dict.fromkeys(method["name"] for run in runs for method in run["methods"]))
    rows = []
    for run in runs:
        by_name = {method["name"]: method for method in run["methods"]}
        bounds = run["bounds"]
        row = [str(run["ranks"]), f"{bounds['lower']:,.0f}", f"{bounds['upper']:,.0f}"]
        for name in names:
            words = by_name[name]["words"]
            cell = f"{words['mean']:,.0f}"
            if words["busiest"] > BUSIER * words["mean"]:
                cell += f" ({words['busiest']:,.0f})"
            row.append(cell)
        rows.append(row)
    first = runs[0]
    heading = f"words per rank and step (busiest rank), n = {first['length']:,}, density {first['density']:g}"
    headers = ["ranks", "2k(P−1)/P", "6k(P−1)/P", *names]
    align = ("right",) * len(headers)
    return f"{heading}\n\n{tabulate(rows, headers=headers, colalign=align, disable_numparse=True)}"


def _ms(times: dict[str, float] | None, name: str, digits: int) -> str:
    return MISSING if times is None else f"{times[name] * 1e3:.{digits}f}"


def document_tables(content: dict[str, Any]) -> str:
    """All tables of a document."""
    if content["kind"] == "gpu table":
        return gpu_tables(content)
    if content["kind"] == "sweep":
        return sweep_table(content["runs"])
    return "\n\n".join(run_tables(run) for run in content["runs"])


def insert(text: str, name: str, tables: str) -> str:
    """A text with the tables of the file `name` between its marks.

    Raises:
        BenchError: the marks are not there, once each and in order.
    """
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise BenchError(f"the text does not hold the lines {first} and {last}, once each and in this order")
    before, after = text[: text.index(first) + len(first)], text[text.index(last) :]
    return f"{before}\n\n{tables}\n\n{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a document's tables, or put them into a text. Returns the exit status: 0, or 2 with one message."""
    parser = argparse.ArgumentParser(prog="python -m jobs.bench.tables", allow_abbrev=False)
    parser.add_argument("document", type=Path, metavar="FILE.json")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="a text with a pair of marks")
    given = parser.parse_args(argv)
    try:
        tables = document_tables(read(given.document))
        if given.into is None:
            print(tables)
        else:
            text = given.into.read_text(encoding="utf-8")
            given.into.write_text(insert(text, given.document.name, tables), encoding="utf-8")
    except (BenchError, OSError) as error:
        print(f"jobs.bench.tables: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
