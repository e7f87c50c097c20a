"""Tables of the report: methods and sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jobs.render.table import MISSING, Cell, Column, Form, Table, beside, figure, milliseconds, shown, table
from jobs.report.groups import Group, differences, group_runs, reads_text, stands_out
from jobs.report.summary import Run

ERROR_RATES = {"word_error_rate": "WER", "character_error_rate": "CER"}
"""Figures of speech -> their heads."""


def _spread(figure: str, percent: bool, group: Group) -> Cell:
    """A figure's mean, with its deviation and extremes over the seeds."""
    mean, spread, values = group.mean(figure), group.spread(figure), group.values(figure)
    form = "{:.2%}".format if percent else "{:.4f}".format
    if spread is None:
        return Cell(shown(mean, form), "" if mean is None or group.counted[0].complete else "so far")
    deviation = f"{100 * spread:.2f}" if percent else form(spread)
    return Cell(f"{shown(mean, form)} ± {deviation}", f"{form(min(values))} … {form(max(values))}")


def groups_table(columns: Sequence[Column], groups: Sequence[Group], title: str, note: str = "") -> Table:
    """A row for each group, that of Ok-Topk bold beside others."""
    return table(columns, groups, title, note, strong=partial(stands_out, among=groups))


def runs_in_words(group: Group) -> str:
    """Number of seeds of a group, and of its unfinished runs."""
    unfinished = sum(not run.complete for run in group.runs)
    seeds = len({run.info.seed for run in group.runs})
    parts = [f"{seeds} seeds"] * (seeds > 1)
    parts += [f"{unfinished} of {len(group.runs)} unfinished"] * (unfinished > 0)
    return ", ".join(parts)


def pair(first: str, form: Form, second: str, small: Form) -> Callable[[Group], Cell]:
    """Cells of two figures, the second one small and left out where it is missing."""
    return beside(figure(first, form), figure(second, small, missing=""))


METHOD = Column("Method", lambda group: Cell(group.label, colour=group.colour))
_AT_THE_END = "held out, at the end"
ACCURACY = Column("Accuracy", partial(_spread, "held_out_accuracy", True), _AT_THE_END)
LOSS = Column("Loss", partial(_spread, "held_out_loss", False), _AT_THE_END)
SPEECH = [Column(head, partial(_spread, name, False), _AT_THE_END) for name, head in ERROR_RATES.items()]
WORDS = Column("Words", pair("words", "{:,.0f}", "share_of_dense", "{:.1%} of dense"), "per rank and step")
BYTES = Column(
    "MB",
    pair("megabytes", "{:,.1f}", "share_of_bfloat16_ring", "{:.2%} of a bfloat16 ring's"),
    "per rank, the whole run",
)
STEP = Column(
    "Step, ms", pair("step_seconds", milliseconds, "step_seconds_median", milliseconds), "mean; median"
)
DEVIATION = Column(
    "|nnz−k|/k", pair("global_nnz_deviation", "{:.1%}", "local_nnz_deviation", "{:.1%}"), "global; local"
)
XI = Column("ξ", pair("xi", "{:.2f}", "xi_largest", "{:.2f}"), "mean; largest")


def method_figures(group: Group, target: float | None = None) -> dict[str, Any]:
    """A group in single figures, for methods.csv: those of its complete runs, None where it has none.

    Figures that end in "_largest" are the largest over the runs, all others means; those of held-out samples have their deviation
    and extremes besides.

    Args:
        group: one or more runs.
        target: the accuracy that time and steps are taken to.
    """
    result: dict[str, Any] = {
        "series": group.label,
        "method": group.method,
        "ranks": group.ranks,
        "runs": len(group.runs),
        "complete_runs": sum(run.complete for run in group.runs),
        "batch_size": group.runs[0].info.batch_size,
    }
    for name in ("held_out_accuracy", *ERROR_RATES, "held_out_loss"):
        rates = group.values(name)
        result |= {name: group.mean(name), f"{name}_deviation": group.spread(name)}
        result |= {f"{name}_least": min(rates, default=None), f"{name}_largest": max(rates, default=None)}
    result |= {name: group.total(name) for name in group.figure_names if name not in result}
    if target is not None:
        seconds, steps = group.seconds_to(target), group.steps_to(target)
        result |= {"target": target, "runs_that_reached_it": len(seconds)}
        result["seconds_to_target"] = sum(seconds) / len(seconds) if seconds else None
        result["steps_to_target"] = sum(steps) / len(steps) if steps else None
    return result


def methods_table(groups: Sequence[Group], target: float | None = None, xi: bool = True) -> Table:
    """Accuracy (of speech its error rates, of text its loss too), time to the target, words, times and perhaps xi."""
    speech = any(group.values("character_error_rate") for group in groups)
    columns = [
        METHOD._replace(cell=lambda group: Cell(group.label, runs_in_words(group), group.colour)),
        *(SPEECH if speech else [LOSS, ACCURACY] if reads_text(groups) else [ACCURACY]),
    ]
    if target is not None:
        head = f"To WER {1 - target:.4g}" if speech else f"To {100 * target:.4g}%"
        columns.append(Column(head, partial(_to_target, target), "training time"))
    columns += [
        WORDS,
        *([BYTES] if reads_text(groups) else []),
        STEP,
        Column("Compute", figure("part_compute_seconds", milliseconds), "ms"),
        Column("Selection", figure("part_selection_seconds", milliseconds), "ms"),
        Column("Exchange", _exchange, "ms"),
        Column("Data", _data, "of a step"),
        DEVIATION,
        *[XI] * xi,
    ]
    evaluated = [run for group in groups for run in group.runs if run.evaluations["step"].size]
    words = max((int(run.evaluations["samples"][-1]) for run in evaluated), default=1)
    heard = f" Error rates are of {words} words: one of them is {1 / words:.4f}." if speech else ""
    seeds = any(len(group.counted) > 1 for group in groups)
    rates = [column.head for column in columns if column in (ACCURACY, LOSS, *SPEECH)]
    spread = f"{', '.join(rates)}: mean over the seeds ± sample standard deviation. " * seeds
    combined = any(group.mean("part_combined_seconds") for group in groups)
    both = "Both: selection and exchange in one stream of kernels. " if combined else ""
    note = f"{spread}Times leave out the first steps, evaluations and measurements. {both}Words: "
    note += f"payload; a share is that of a dense allreduce, 2n(P−1)/P.{heard}"
    return groups_table(columns, groups, "Methods", note)


def _to_target(target: float, group: Group) -> Cell:
    seconds, steps, runs = group.seconds_to(target), group.steps_to(target), len(group.counted)
    if not seconds:
        return Cell("not reached")
    share = "" if len(seconds) == runs else f"{len(seconds)} of {runs} runs; "
    return Cell(f"{sum(seconds) / len(seconds):,.1f} s", f"{share}{sum(steps) / len(steps):,.0f} steps")


def _exchange(group: Group) -> Cell:
    combined = group.mean("part_combined_seconds")
    exchange = shown(group.mean("part_communication_seconds"), milliseconds)
    return Cell(exchange, f"+ {milliseconds(combined)} both" if combined else "")


def _data(group: Group) -> str:
    step = group.mean("step_seconds")
    return f"{(group.mean('part_data_seconds') or 0.0) / step:.1%}" if step else MISSING


def swept(usual: Sequence[Run], others: Sequence[Run]) -> dict[Group, dict[str, Any]]:
    """Groups of Ok-Topk with the settings in which they differ, in the order of these; empty while they differ in none.

    Args:
        usual: runs with the usual settings, of any method.
        others: runs that differ from them.
    """
    groups = group_runs([*(run for run in usual if run.info.method == "oktopk"), *others]) if others else []
    values = differences(groups)
    found = {group: {name: values[name][i] for name in values} for i, group in enumerate(groups) if values}
    return dict(sorted(found.items(), key=lambda item: [_key(value) for value in item[1].values()]))


def _key(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))


def sweep_table(settings: dict[Group, dict[str, Any]], dense: Group | None) -> Table:
    """Loss, deviation, xi, words and time of each of `swept`; dense: what losses are held against."""
    reference = None if dense is None else dense.mean("held_out_loss")

    def setting(name: str, note: Callable[[Group], str], group: Group) -> Cell:
        return Cell(str(settings[group][name]), note(group))

    def above(group: Group) -> str:
        loss = group.mean("held_out_loss")
        return MISSING if loss is None or not reference else f"{loss / reference - 1:+.2%}"

    columns: list[Column] = []
    for name in next(iter(settings.values())):
        runs = runs_in_words if not columns else lambda group: ""
        columns.append(Column(name.split(".")[-1], partial(setting, name, runs)))
    columns += [LOSS, Column("Above dense's", above), DEVIATION, XI, WORDS, STEP]
    note = "Ok-Topk, all else as above; the same figures and more in sweep.csv."
    return groups_table(columns, list(settings), "Sweep", note)
