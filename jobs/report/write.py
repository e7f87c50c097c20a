"""Writes a report: one self-contained HTML page, and CSV files; returns its tables as text."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.command import escaped
from data.durable import replaced
from jobs.render.chart import Chart
from jobs.render.draw import svg
from jobs.render.table import MISSING, Cell, Column, Table, table, write_columns, write_rows
from jobs.report.groups import Group, differences, group_runs, settings_of
from jobs.report.pictures import sections
from jobs.report.summary import Run, figures, read_readable
from jobs.report.tables import method_figures, methods_table, speed_tables, steps_table
from jobs.run.file import RunFileError

COMMIT = r"^(.{10})[^-]*"  # what is shown of it, and whether files differed


def render(
    title: str,
    *,
    groups: Sequence[Group],
    besides: Sequence[Group] = (),
    tables: Sequence[Table],
    sections: Mapping[str, Sequence[Chart]],
    notes: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        title: its heading.
        groups: what it compares, one or more; besides: further ones whose provenance it states.
        tables: above the pictures.
        sections: heading -> pictures.
        notes: what a reader must know first.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    everything = [*groups, *besides]
    runs = [run for group in everything for run in group.runs]
    return environment.get_template("template.html").render(
        title=title,
        notes=notes,
        tables=tables,
        sections={heading: list(map(_picture, panels)) for heading, panels in sections.items()},
        facts=facts(runs),
        runs=table(_RUNS, [(group, run) for group in everything for run in group.runs], "Runs"),
        differing=_differences_table(groups),
        commands="\n".join(f"{run.stem}: {run.info.command or 'not on record'}" for run in runs),
        shared=_shared(groups),
    )


def _picture(panel: Chart) -> dict[str, str]:
    encoded = base64.b64encode(svg(panel).encode()).decode()
    rows = len(panel.rows())
    return {
        "title": panel.title,
        "note": panel.note,
        "csv": f"{panel.name}.csv",
        "alt": f"{panel.title}: {panel.note}. The {rows} points drawn are in {panel.name}.csv.",
        "source": f"data:image/svg+xml;base64,{encoded}",
    }


def hardware(run: Run) -> str:
    """The machine of a run in a few words."""
    known = dict(json.loads(run.info.hardware))
    gpus: list[str] = known.get("gpus") or []
    parts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    if known.get("cpu"):
        parts.append(f"{known.get('cores', '?')} cores ({known['cpu']})")
    if known.get("memory_bytes"):
        parts.append(f"{known['memory_bytes'] / 2**30:.0f} GiB")
    return ", ".join(parts) or MISSING


def task(run: Run) -> str:
    """Network, data, length and optimizer of a run, in a line."""
    config = run.config
    model, data = config.get("model", {}), config.get("data", {})
    training, optimizer, schedule = (config.get(name, {}) for name in ("training", "optimizer", "schedule"))
    length = f"{training['epochs']} epochs" if training.get("epochs") else f"{training.get('steps')} steps"
    size = f"width {model.get('width')}"
    if model.get("name") in ("bert", "gpt", "vit"):
        size = f"{model.get('layers')} layers of {model.get('hidden')}"
    network = model.get("factory") or f"{model.get('name')} of {size}"
    accumulated = f" x {training['accumulate']}" if training.get("accumulate", 1) > 1 else ""
    return (
        f"{network} on {data.get('name')} "
        f"({Path(data.get('path') or '-').name}); {length}, batches of {run.info.batch_size}{accumulated} a rank, "
        f"{optimizer.get('name')} at {optimizer.get('lr')} with the schedule {schedule.get('name')}; "
        f"{training.get('precision', 'float32')}{', CUDA graphs' if training.get('cuda_graph') else ''}"
    )


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Task, hardware, host, commit, date and software of all runs."""
    versions = [dict(json.loads(run.info.versions)) for run in runs]
    names = dict.fromkeys(name for each in versions for name in each)
    software = "; ".join(
        f"{name} {' / '.join(dict.fromkeys(str(each.get(name, '?')) for each in versions))}" for name in names
    )
    each = {
        "Task": [task(run) for run in runs],
        "Hardware": [hardware(run) for run in runs],
        "Host": [run.info.host for run in runs],
        "Commit": [run.info.commit or "not a checkout" for run in runs],
        "Date": [run.info.started[:10] for run in runs],
    }
    listed = [(name, "; ".join(dict.fromkeys(values))) for name, values in each.items()]
    return [*listed, ("Software", software or MISSING)]


_RUNS = [
    Column("Run", lambda run: run[1].stem),
    Column("Method", lambda run: run[0].label),
    Column("Seed", lambda run: str(run[1].info.seed)),
    Column("Ranks", lambda run: str(run[1].info.ranks)),
    Column("Steps", lambda run: f"{run[1].count:,}"),
    Column("Ended", lambda run: run[1].status),
    Column("Started", lambda run: run[1].info.started.replace("T", " ").removesuffix("+00:00")),
    Column("Commit", lambda run: re.sub(COMMIT, r"\1", run[1].info.commit) or MISSING),
]
"""Columns of (group, run)."""


def _differences_table(groups: Sequence[Group]) -> Table:
    def value(row: tuple[str, list[Any]], number: int) -> Cell:
        setting = row[1][number]
        return Cell(MISSING if setting is None else json.dumps(setting), wrap=True)

    columns = [Column("Setting", lambda row: row[0])]
    columns += [Column(group.label, partial(value, number=i)) for i, group in enumerate(groups)]
    return table(columns, differences(groups).items(), "Settings in which methods differ")


def _shared(groups: Sequence[Group]) -> str:
    differing = differences(groups)
    settings: dict[str, Any] = settings_of(groups[0].runs[0])
    return "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in settings.items() if name not in differing
    )


Groups = Mapping[str, Sequence[Group]]
"""Kind of runs, "train", "speed" or "slow" -> its groups; see report()."""
PAGE = "index.html"
SERIES = "runs"


class Report(NamedTuple):
    """What was written: tables, a note on every run that is not what it seems, and the runs."""

    tables: Sequence[Table]
    notes: Sequence[str]
    runs: Sequence[Run]

    def __str__(self) -> str:
        return "\n".join([*(table.turned() for table in self.tables), *self.notes])


def report(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    throughput: Sequence[str | Path] = (),
    slow: Sequence[str | Path] = (),
    target: float | None = None,
    title: str = "",
    first: Callable[[Groups], Sequence[Table]] = lambda groups: (),
    notes_besides: Sequence[str] = (),
) -> Report:
    """Write the page and the CSV files into folder, which is made if need be.

    Args:
        paths: run files; throughput: of runs that are compared by their speed alone; slow: of such runs over links of 1 Gb/s.
        folder: made if need be.
        target: an accuracy to which times are taken.
        title: the page's heading.
        first: further tables of the groups, above all others.
        notes_besides: what the files do not say, for the page.

    Raises:
        RunFileError: none of the files is a run; or the folder cannot be written.
    """
    runs: dict[str, list[Run]] = {}
    problems: list[str] = []
    for kind, files in {"train": paths, "speed": throughput, "slow": slow}.items():
        runs[kind], unread = read_readable(files)
        problems += unread
    if not (runs["train"] or runs["speed"]):
        raise RunFileError("; ".join(problems) or "no run file was named")
    groups = {kind: group_runs(of_kind) for kind, of_kind in runs.items()}
    shown = groups["train"] or groups["speed"]
    compared = [group for kind in ("train", "speed") for group in groups[kind]]
    remarks = [*notes(groups["train"]), *(f"left out: {problem}" for problem in problems)]
    pictures, folder = sections(groups["train"], target), Path(folder)
    shown_tables = [*first(groups), *tables(groups, target)]
    try:
        (folder / SERIES).mkdir(parents=True, exist_ok=True)
        for run in (run for of_kind in runs.values() for run in of_kind):
            _write_series(run, folder / SERIES)
        write_rows([figures(run) for of_kind in runs.values() for run in of_kind], folder / "summary.csv")
        write_rows([method_figures(group, target) for group in compared], folder / "methods.csv")
        for panel in (panel for panels in pictures.values() for panel in panels):
            write_rows(panel.rows(), folder / f"{panel.name}.csv")
        page = render(
            title or "Runs compared",
            groups=shown,
            besides=[group for of_kind in groups.values() for group in of_kind if group not in shown],
            tables=shown_tables,
            sections=pictures,
            notes=[*remarks, *notes_besides],
        )
        with replaced(folder / PAGE) as draft:
            draft.write_text(escaped(page), encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{folder} cannot be written: {error}") from error
    return Report(shown_tables, remarks, [run for of_kind in runs.values() for run in of_kind])


def tables(groups: Groups, target: float | None) -> list[Table]:
    """The tables of a report, those with nothing to show left out; target: an accuracy to which times are taken."""
    trained = groups["train"]
    parts = [methods_table(trained, target)] if trained else []
    # where the time goes: of runs for that alone, else of those that were trained
    parts += speed_tables(groups["speed"] or trained)
    if groups["slow"]:
        parts.append(steps_table(groups["slow"], " over links of 1 Gb/s"))
    return parts


def _write_series(run: Run, folder: Path) -> None:
    stages = {f"stage_{name}": values[: run.count] for name, values in run.stages.items()}
    further = {"words_sent": np.cumsum(run.steps["words"]), "training_seconds": run.training_seconds}
    write_columns(folder / f"{run.stem}-steps.csv", {**run.steps, **further, **stages})
    for name, series in (("evaluations", run.evaluations), ("measures", run.measures)):
        if len(series["step"]):
            write_columns(folder / f"{run.stem}-{name}.csv", series)


def notes(groups: Sequence[Group]) -> list[str]:
    """Notes below the table: unfinished runs, skipped steps, warm-ups."""
    lines = []
    for run in (run for group in groups for run in group.runs):
        figure = figures(run)
        if run.status == "running":
            lines.append(f"{run.stem}: unfinished after {run.count} steps: still running, or killed")
        elif not run.complete:
            lines.append(f"{run.stem}: unfinished after {run.count} steps: {run.status}")
        if figure["skipped_steps"]:
            lines.append(
                f"{run.stem}: {figure['skipped_steps']} steps skipped, their gradients were not finite"
            )
    warmed: dict[str, list[str]] = {}
    for group in groups:
        figure = figures(group.runs[0])
        dense, denser, words = (figure[n] for n in ("dense_steps", "denser_steps", "words_sparse_steps"))
        # all steps of a dense method are
        if denser or (dense and words is not None):
            share = f"{dense} of {group.runs[0].count} steps were dense"
            share += f", {denser} of a higher density" if denser else ""
            sent = "none" if words is None else f"{words:,.0f}"
            warmed.setdefault(share, []).append(f"{group.label} {sent}")
    return lines + [
        f"{share}; words per step in the others: {', '.join(each)}" for share, each in warmed.items()
    ]
