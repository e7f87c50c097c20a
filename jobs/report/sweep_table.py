"""Ok-Topk with other intervals and densities than the usual ones, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.report.groups import Group, differences, group_runs
from jobs.report.page import MISSING, Cell, Table
from jobs.report.summary import Run
from jobs.report.tables import (
    Figures,
    deviation_cell,
    method_figures,
    runs_in_words,
    spread_cell,
    step_cell,
    words_cell,
    xi_cell,
)


def swept(usual: Sequence[Run], others: Sequence[Run]) -> list[tuple[dict[str, Any], Group]]:
    """Groups with the settings in which they differ, in the order of these; none while they differ in none.

    Args:
        usual: runs with the usual settings, of any method; those of Ok-Topk are taken.
        others: runs that differ from them.
    """
    if not others:
        return []
    groups = group_runs([*(run for run in usual if run.info.method == "oktopk"), *others])
    values = differences(groups)
    if not values:
        return []
    settings = [{name: values[name][place] for name in values} for place in range(len(groups))]
    return sorted(
        zip(settings, groups, strict=True), key=lambda pair: [_key(value) for value in pair[0].values()]
    )


def _key(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))


def sweep_table(rows: Sequence[tuple[dict[str, Any], Group]], dense: Group | None) -> Table:
    """Loss, deviation, xi, words and time of each; rows: as swept() gives them; dense: what losses are held against."""
    names = list(rows[0][0])
    reference = None if dense is None else dense.mean("held_out_loss")
    heads = [
        *(Cell(name.split(".")[-1]) for name in names),
        Cell("Loss", "held out, at the end"),
        Cell("Above dense's"),
        Cell("|nnz−k|/k", "global; local"),
        Cell("ξ", "mean; largest"),
        Cell("Words", "per rank and step"),
        Cell("Step, ms", "mean; median"),
    ]
    cells = []
    for settings, group in rows:
        figures = method_figures(group)
        named = [Cell(str(value)) for value in settings.values()]
        named[0] = Cell(named[0].text, runs_in_words(group))
        cells.append(
            [
                *named,
                spread_cell("held_out_loss", group, figures),
                Cell(_above(figures["held_out_loss"], reference)),
                deviation_cell(figures),
                xi_cell(figures),
                words_cell(figures),
                step_cell(figures),
            ]
        )
    return Table(
        "Sweep", heads, cells, note="Ok-Topk, all else as above; the same figures and more in sweep.csv."
    )


def sweep_rows(rows: Sequence[tuple[dict[str, Any], Group]]) -> list[Figures]:
    """The same for sweep.csv, with all figures of methods.csv."""
    return [{**settings, **method_figures(group)} for settings, group in rows]


def _above(loss: float | None, reference: float | None) -> str:
    return MISSING if loss is None or not reference else f"{loss / reference - 1:+.2%}"
