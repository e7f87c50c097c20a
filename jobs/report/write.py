"""Writes the report of some runs: page, picture, CSV files; and the table that closes it in the terminal."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from jobs.report import pictures, time_pictures
from jobs.report.draw import draw_overview
from jobs.report.groups import Group, group_runs, reads_text
from jobs.report.page import MISSING, Claim, Section, Table, render
from jobs.report.speed_tables import speed_tables
from jobs.report.summary import Run, figures, read_readable
from jobs.report.sweep_table import sweep_rows, sweep_table, swept
from jobs.report.tables import method_figures, methods_table, regions_table
from jobs.run.columns import PHASES
from jobs.run.file import RunFileError

INDENT = "\x01"  # tabulate would strip blanks
PAGE = "index.html"
SERIES = "runs"


def report(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    regions: Sequence[str | Path] = (),
    throughput: Sequence[str | Path] = (),
    sweep: Sequence[str | Path] = (),
    target: float | None = None,
    title: str = "",
    claims: Sequence[Claim] = (),
    notes_besides: Sequence[str] = (),
) -> str:
    """Write the page, the picture and the CSV files into folder, which is made if need be.

    Args:
        paths: run files; sweep: of Ok-Topk with other settings than in paths; regions: of runs that are compared by the
            balance of their regions alone; throughput: by their speed alone.
        folder: made if need be.
        target: an accuracy to which times are taken.
        title: the page's heading.
        claims: what the runs were to show; notes_besides: what the files do not say. For the page.

    Returns:
        The closing table, with a note below it on every run that is not what it seems.

    Raises:
        RunFileError: none of the files is a run; or the folder cannot be written.
    """
    runs, problems = read_readable(paths)
    cut, cut_problems = read_readable(regions)
    fast, slow_problems = read_readable(throughput)
    others, other_problems = read_readable(sweep)
    problems += other_problems + cut_problems + slow_problems
    if not runs and not cut and not fast:
        raise RunFileError("; ".join(problems) or "no run file was named")
    groups, cut_groups, fast_groups = group_runs(runs), group_runs(cut), group_runs(fast)
    every = [*groups, *cut_groups, *fast_groups]
    shown = groups or fast_groups or cut_groups
    said = [*notes(groups), *(f"left out: {problem}" for problem in problems)]
    sections = _sections(groups, fast_groups, target)
    folder = Path(folder)
    try:
        (folder / SERIES).mkdir(parents=True, exist_ok=True)
        for run in runs + others + cut + fast:
            _write_series(run, folder / SERIES)
        _write_rows([figures(run) for run in runs + others + cut + fast], folder / "summary.csv")
        _write_rows([method_figures(group, target) for group in every], folder / "methods.csv")
        if rows := swept(runs, others):
            _write_rows(sweep_rows(rows), folder / "sweep.csv")
        for panel in (panel for section in sections for panel in section.panels):
            _write_rows(panel.rows(), folder / f"{panel.name}.csv")
        if groups:
            overview = (
                pictures.loss(groups, pictures.STEPS),
                pictures.loss(groups, pictures.WORDS),
                pictures.words(groups),
            )
            draw_overview(overview, folder / "report.png")
        page = render(
            title or "Runs compared",
            groups=shown,
            besides=[*group_runs(others), *(group for group in every if group not in shown)],
            tables=tables({"train": runs, "sweep": others, "regions": cut, "speed": fast}, target),
            sections=sections,
            notes=[*said, *notes_besides],
            claims=claims,
        )
        (folder / PAGE).write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{folder} cannot be written: {error}") from error
    return "\n".join([closing_table(shown), *said])


def tables(runs: Mapping[str, Sequence[Run]], target: float | None) -> list[Table]:
    """The tables of a report, those with nothing to show left out.

    Args:
        runs: "train", "sweep", "regions" and "speed" -> runs of that kind, see report().
        target: an accuracy to which times are taken.
    """
    groups, found = group_runs(runs["train"]), []
    if groups:
        found.append(methods_table(groups, target))
    if rows := swept(runs["train"], runs["sweep"]):
        dense = next((group for group in groups if group.method == "dense"), None)
        found.append(sweep_table(rows, dense))
    if runs["regions"]:
        found.append(regions_table(group_runs(runs["regions"])))
    return found + speed_tables(group_runs(runs["speed"]))


def _sections(groups: Sequence[Group], fast: Sequence[Group], target: float | None) -> list[Section]:
    """The pictures of the page; those with nothing to show are left out."""
    over = (pictures.STEPS, pictures.TIME, pictures.WORDS)
    losses = [pictures.held_out_loss(groups, each) for each in over] if reads_text(groups) else []
    sections = [
        Section("Held-out loss", losses),
        Section(
            "Held-out accuracy",
            [*(pictures.accuracy(groups, each, target) for each in over), pictures.final_accuracy(groups)],
        ),
        Section(
            "Training loss", [*(pictures.loss(groups, each) for each in over), pictures.learning_rate(groups)]
        ),
        Section("Where the time goes", [time_pictures.time_parts(groups), time_pictures.time_stages(groups)]),
        Section("Speed", time_pictures.speed(fast)),
        Section(
            "Volume and selection",
            [
                pictures.words(groups),
                *(pictures.entries(groups, which) for which in ("global", "local")),
                *(pictures.threshold(groups, which) for which in ("global", "local")),
            ],
        ),
        Section("The paper's assumption", [pictures.measure(groups, column) for column in ("xi", "fill_in")]),
    ]
    return [Section(each.title, [panel for panel in each.panels if panel.rows()]) for each in sections]


def _write_series(run: Run, folder: Path) -> None:
    stages = {f"stage_{name}": values[: run.count] for name, values in run.stages.items()}
    columns: dict[str, Mapping[str, NDArray[Any]]] = {
        "steps": {
            "step": run.steps["step"],
            **run.steps,
            "words_sent": run.words_sent,
            "training_seconds": run.training_seconds,
            **stages,
        },
        "evaluations": {"step": run.evaluations["step"], **run.evaluations},
        "measures": {"step": run.measures["step"], **run.measures},
    }
    for name, series in columns.items():
        if name != "steps" and not len(series["step"]):
            continue
        with open(folder / f"{run.stem}-{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(series)
            # a run that was killed may have a row of steps whose stages were not written any more
            writer.writerows(zip(*(np.asarray(values).tolist() for values in series.values()), strict=False))


def _write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def closing_table(groups: Sequence[Group]) -> str:
    """One column per group, one line per figure, means over the group's complete runs."""
    lines: list[tuple[str, str, str]] = [
        ("runs", "runs", "{:.0f}"),
        ("ranks", "ranks", "{:.0f}"),
        ("steps", "steps", "{:.0f}"),
        ("held-out accuracy", "held_out_accuracy", "{:.2%}"),
        ("  word error rate", "word_error_rate", "{:.4f}"),
        ("  character error rate", "character_error_rate", "{:.4f}"),
        ("held-out loss", "held_out_loss", "{:.4f}"),
        ("words per rank and step", "words", "{:,.0f}"),
        ("  busiest rank", "words_busiest", "{:,.0f}"),
        ("  share of dense, 2n(P−1)/P", "share_of_dense", "{:.2%}"),
        ("  lower bound 2k(P−1)/P", "lower_bound_words", "{:,.0f}"),
        ("  upper bound 6k(P−1)/P", "upper_bound_words", "{:,.0f}"),
        ("  control, besides", "control_words", "{:,.0f}"),
        ("mean |global nnz − k| / k", "global_nnz_deviation", "{:.2%}"),
        ("busiest region / mean", "region_balance", "{:.2f}"),
        ("ξ", "xi", "{:.2f}"),
        ("fill-in", "fill_in", "{:.2f}"),
        ("step, ms", "step_seconds", "ms"),
    ]
    for phase in PHASES:
        lines.append((f"  {phase}", f"{phase}_seconds", "ms"))
        if phase == "reduction":
            lines += [
                (f"    {stage}", f"stage_{stage}_seconds", "ms")
                for stage in time_pictures.ordered_stages(groups)
            ]
    lines.append(("training, s", "total_seconds", "{:.1f}"))
    table = []
    for title, name, form in lines:
        if name == "runs":
            cells = [str(len(group.runs)) for group in groups]
            if set(cells) == {"1"}:
                continue
        else:
            cells = [_cell(group.mean(name), form) for group in groups]
        if any(cell != MISSING for cell in cells):
            table.append([re.sub(r"^ +", lambda indent: INDENT * len(indent[0]), title), *cells])
    align = ("left", *("right" for _ in groups))
    text = tabulate(
        table, headers=["", *(group.label for group in groups)], colalign=align, disable_numparse=True
    )
    return text.replace(INDENT, " ")


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return MISSING
    return f"{value * 1e3:.1f}" if form == "ms" else form.format(value)


def notes(groups: Sequence[Group]) -> list[str]:
    """What a reader of the table must know besides."""
    lines = []
    for run in (run for group in groups for run in group.runs):
        figure = figures(run)
        if run.status == "running":
            lines.append(f"{run.label}: unfinished after {run.count} steps: still running, or killed")
        elif not run.complete:
            lines.append(f"{run.label}: unfinished after {run.count} steps: {run.status}")
        if figure["skipped_steps"]:
            lines.append(
                f"{run.label}: {figure['skipped_steps']} steps skipped, their gradients were not finite"
            )
    warmed: dict[str, list[str]] = {}
    for group in groups:
        figure = figures(group.runs[0])
        dense, denser, words = (figure[n] for n in ("dense_steps", "denser_steps", "words_sparse_steps"))
        # all steps of a dense method are
        if denser or (dense and words is not None):
            share = f"{dense} of {group.runs[0].count} steps were dense"
            share += f", {denser} of a higher density" if denser else ""
            said = "none" if words is None else f"{words:,.0f}"
            warmed.setdefault(share, []).append(f"{group.label} {said}")
    return lines + [
        f"{share}; words per step in the others: {', '.join(each)}" for share, each in warmed.items()
    ]
