"""Renders the report as one self-contained HTML page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobs.render.chart import Chart
from jobs.render.draw import svg
from jobs.render.table import MISSING, Cell, Column, Table, table
from jobs.report.groups import Group, differences, settings_of
from jobs.report.summary import Run

COMMIT = 10  # characters of it that are shown


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


def short_commit(run: Run) -> str:
    """The first characters of a run's commit, and whether files differed from it."""
    commit = run.info.commit
    return commit[:COMMIT] + ("-dirty" if commit.endswith("-dirty") else "") or MISSING


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
    found = [(name, "; ".join(dict.fromkeys(values))) for name, values in each.items()]
    return [*found, ("Software", software or MISSING)]


_RUNS = [
    Column("Run", lambda run: run[1].stem),
    Column("Method", lambda run: run[0].label),
    Column("Seed", lambda run: str(run[1].info.seed)),
    Column("Ranks", lambda run: str(run[1].info.ranks)),
    Column("Steps", lambda run: f"{run[1].count:,}"),
    Column("Ended", lambda run: run[1].status),
    Column("Started", lambda run: run[1].info.started.replace("T", " ").removesuffix("+00:00")),
    Column("Commit", lambda run: short_commit(run[1])),
]
"""Columns of (group, run)."""


def _differences_table(groups: Sequence[Group]) -> Table:
    def value(row: tuple[str, list[Any]], number: int) -> Cell:
        found = row[1][number]
        return Cell(MISSING if found is None else json.dumps(found), wrap=True)

    columns = [Column("Setting", lambda row: row[0])]
    columns += [Column(group.label, partial(value, number=i)) for i, group in enumerate(groups)]
    return table(columns, differences(groups).items(), "Settings in which methods differ")


def _shared(groups: Sequence[Group]) -> str:
    differing = differences(groups)
    settings: dict[str, Any] = settings_of(groups[0].runs[0])
    return "\n".join(
        f"{name} = {json.dumps(value)}" for name, value in settings.items() if name not in differing
    )
