"""Compare runs: one picture, CSV files and a closing table.

    python -m jobs.report runs/dense.h5 runs/oktopk.h5 -o report

Runs may still be going on, or have been killed. Writes report.png, summary.csv (a row per run), and of each
run RUN-steps.csv and RUN-evaluations.csv.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tabulate import tabulate

from jobs.bench_document import BenchError
from jobs.bench_figures import report_bench
from jobs.figures import draw
from jobs.runfile import PHASES, RunFileError
from jobs.summary import Run, figures, read_runs

MISSING = "–"
INDENT = "\x01"  # tabulate would strip blanks


def report(paths: Sequence[str | Path], folder: str | Path) -> str:
    """Write the picture and the CSV files into folder, which is made if need be.

    Returns:
        The closing table, with a note below it on every run that is not what it seems.

    Raises:
        RunFileError: see read_runs; or the folder cannot be written.
    """
    runs = read_runs(paths)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for run in runs:
            _write_series(run, folder)
        _write_summary(runs, folder / "summary.csv")
        draw(runs, folder / "report.png")
    except OSError as error:
        raise RunFileError(f"{folder} cannot be written: {error}") from error
    return "\n".join([closing_table(runs), *notes(runs)])


def _write_series(run: Run, folder: Path) -> None:
    stages = {f"stage_{name}": values[: run.count] for name, values in run.stages.items()}
    steps = {"step": run.steps["step"], **run.steps, "words_sent": run.words_sent, **stages}
    evaluations = {"step": run.evaluations["step"], **run.evaluations}
    for name, columns in (("steps", steps), ("evaluations", evaluations)):
        with open(folder / f"{run.stem}-{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            # a run that was killed may have a row of steps whose stages were not written any more
            writer.writerows(zip(*(np.asarray(values).tolist() for values in columns.values()), strict=False))


def _write_summary(runs: Sequence[Run], path: Path) -> None:
    rows = [figures(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def closing_table(runs: Sequence[Run]) -> str:
    """One column per run, one line per figure."""
    columns = [figures(run) for run in runs]
    lines: list[tuple[str, str, str]] = [
        ("ranks", "ranks", "{:d}"),
        ("steps", "steps", "{:d}"),
        ("held-out accuracy", "held_out_accuracy", "{:.2%}"),
        ("held-out loss", "held_out_loss", "{:.4f}"),
        ("words per rank and step", "words", "{:,.0f}"),
        ("  busiest rank", "words_busiest", "{:,.0f}"),
        ("  share of dense, 2n(P−1)/P", "share_of_dense", "{:.2%}"),
        ("  lower bound 2k(P−1)/P", "lower_bound_words", "{:,.0f}"),
        ("  upper bound 6k(P−1)/P", "upper_bound_words", "{:,.0f}"),
        ("  control, besides", "control_words", "{:,.0f}"),
        ("mean |global nnz − k| / k", "global_nnz_deviation", "{:.2%}"),
        ("step, ms", "step_seconds", "ms"),
    ]
    for phase in PHASES:
        lines.append((f"  {phase}", f"{phase}_seconds", "ms"))
        if phase == "reduction":
            stages = dict.fromkeys(stage for run in runs for stage in run.stages)
            lines += [(f"    {stage}", f"stage_{stage}_seconds", "ms") for stage in stages]
    lines.append(("training, s", "total_seconds", "{:.1f}"))
    table = []
    for title, name, form in lines:
        cells = [_cell(figure, name, form) for figure in columns]
        if any(cell != MISSING for cell in cells):
            table.append([re.sub(r"^ +", lambda indent: INDENT * len(indent[0]), title), *cells])
    align = ("left", *("right" for _ in runs))
    text = tabulate(table, headers=["", *(run.label for run in runs)], colalign=align, disable_numparse=True)
    return text.replace(INDENT, " ")


def _cell(figure: dict[str, float | int | str | None], name: str, form: str) -> str:
    value = figure.get(name)
    if value is None:
        return MISSING
    if form == "ms":
        return f"{float(value) * 1e3:.1f}"
    return form.format(value)


def notes(runs: Sequence[Run]) -> list[str]:
    """What a reader of the table must know besides."""
    lines = []
    for run in runs:
        figure = figures(run)
        if run.status == "running":
            lines.append(f"{run.label}: unfinished after {run.count} steps: still running, or killed")
        elif run.status != "complete":
            lines.append(f"{run.label}: unfinished after {run.count} steps: {run.status}")
        dense, words = figure["dense_steps"], figure["words_sparse_steps"]
        if dense and words is not None:
            lines.append(
                f"{run.label}: {dense} of {run.count} steps were dense; "
                f"{words:,.0f} words per step in the others"
            )
        if figure["skipped_steps"]:
            lines.append(
                f"{run.label}: {figure['skipped_steps']} steps skipped, their gradients were not finite"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m jobs.report RUN... -o DIR`. Returns the exit status, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m jobs.report", description="Compare runs of jobs.train.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run file, or a JSON of jobs.bench")
    parser.add_argument("-o", "--output", default="report", metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(argv)
    documents = [path for path in options.runs if Path(path).suffix == ".json"]
    runs = [path for path in options.runs if path not in documents]
    try:
        for document in documents:
            print(report_bench(document, options.output))
        if runs:
            table = report(runs, options.output)
    except (BenchError, RunFileError) as error:
        print(f"jobs.report: {error}", file=sys.stderr)
        return 2
    if runs:
        print(table)
        print(f"\npicture: {Path(options.output) / 'report.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
