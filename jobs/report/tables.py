"""The tables of the report: methods against each other, for the terminal, the page and a Markdown file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tabulate import tabulate

from jobs.report.groups import Group, reads_text
from jobs.report.page import MISSING, Cell, Table

Figures = dict[str, Any]
ERROR_RATES = {"word_error_rate": "WER", "character_error_rate": "CER"}
"""Figures of speech -> their heads."""


Column = tuple[Cell, Callable[[Group, Figures], Cell]]
"""Of a table: its head, and what it says of a group."""


def method_figures(group: Group, target: float | None = None) -> Figures:
    """A group in single figures, for methods.csv: means over its complete runs, None where it has none.

    Args:
        group: one or more runs.
        target: the accuracy that time and steps are taken to.
    """
    result: Figures = {
        "series": group.label,
        "method": group.method,
        "ranks": group.ranks,
        "runs": len(group.runs),
        "complete_runs": sum(run.complete for run in group.runs),
    }
    for name in ("held_out_accuracy", *ERROR_RATES, "held_out_loss"):
        rates = group.values(name)
        result[name], result[f"{name}_deviation"] = group.mean(name), group.spread(name)
        result[f"{name}_least"] = min(rates, default=None)
        result[f"{name}_largest"] = max(rates, default=None)
    for name in (
        "steps",
        "words",
        "words_sparse_steps",
        "words_busiest",
        "share_of_dense",
        "lower_bound_words",
        "upper_bound_words",
        "dense_words",
        "control_words",
        "global_nnz_deviation",
        "local_nnz_deviation",
        "fill_in",
        "xi",
        "region_balance",
        "words_balance",
        "step_seconds",
        "step_seconds_median",
        "samples_per_second",
        "part_compute_seconds",
        "part_selection_seconds",
        "part_communication_seconds",
        "part_combined_seconds",
        "part_data_seconds",
        "training_seconds",
    ):
        result[name] = group.mean(name)
    result["batch_size"] = group.runs[0].info.batch_size
    for name in ("xi_largest", "region_balance_largest"):
        result[name] = max(group.values(name), default=None)
    if target is not None:
        seconds, steps = group.seconds_to(target), group.steps_to(target)
        result["target"] = target
        result["runs_that_reached_it"] = len(seconds)
        result["seconds_to_target"] = sum(seconds) / len(seconds) if seconds else None
        result["steps_to_target"] = sum(steps) / len(steps) if steps else None
    return result


def methods_table(groups: Sequence[Group], target: float | None = None) -> Table:
    """Accuracy (of speech its error rates, of text its loss too), time to the target, words and times of each group."""
    speech = any(group.values("character_error_rate") for group in groups)
    columns: list[Column] = [
        (Cell("Method"), lambda group, row: Cell(group.label, runs_in_words(group), group.colour)),
        *(SPEECH if speech else (*LOSS, *ACCURACY) if reads_text(groups) else ACCURACY),
    ]
    if target is not None:
        head = f"To WER {1 - target:.4g}" if speech else f"To {100 * target:.4g}%"
        columns.append((Cell(head, "training time"), lambda group, row: _to_target(row)))
    columns += [
        (Cell("Words", "per rank and step"), lambda group, row: words_cell(row)),
        (Cell("Step, ms", "mean; median"), lambda group, row: step_cell(row)),
        (Cell("Compute", "ms"), lambda group, row: Cell(milliseconds(row["part_compute_seconds"]))),
        (Cell("Selection", "ms"), lambda group, row: Cell(milliseconds(row["part_selection_seconds"]))),
        (Cell("Exchange", "ms"), lambda group, row: _exchange(row)),
        (Cell("Data", "of a step"), lambda group, row: _data(row)),
        (Cell("|nnz−k|/k", "global; local"), lambda group, row: deviation_cell(row)),
        (Cell("ξ", "mean; largest"), lambda group, row: xi_cell(row)),
    ]
    rows = []
    for group in groups:
        figures = method_figures(group, target)
        rows.append([cell(group, figures) for _, cell in columns])
    words = {
        int(run.evaluations["samples"][-1])
        for group in groups
        for run in group.runs
        if run.evaluations["step"].size
    }
    heard = f" Error rates are of {max(words)} words: one of them is {1 / max(words):.4f}." if speech else ""
    return Table(
        "Methods",
        [head for head, _ in columns],
        rows,
        note="Accuracy, error rates and loss: mean over the seeds ± sample standard deviation. Times leave out the first "
        "steps, evaluations and measurements. Both: selection and exchange in one stream of kernels. Words: "
        f"payload; a share is that of a dense allreduce, 2n(P−1)/P.{heard}",
    )


def regions_table(groups: Sequence[Group]) -> Table:
    """What the busiest rank has to do beside the mean, of Ok-Topk with balanced regions and with equal ones."""
    rows = []
    for group in groups:
        figures = method_figures(group)
        balanced = group.runs[0].config.get("reduction", {}).get("balanced_regions", True)
        largest = figures["region_balance_largest"]
        rows.append(
            [
                Cell("balanced by nnz" if balanced else "of equal length", colour=group.colour),
                Cell(_ratio(figures["region_balance"]), "" if largest is None else f"at most {largest:.2f}"),
                Cell(_ratio(figures["words_balance"])),
                words_cell(figures),
                step_cell(figures),
            ]
        )
    heads = [
        Cell("Regions"),
        Cell("Busiest region", "entries / mean"),
        Cell("Busiest rank", "words sent / mean"),
        Cell("Words", "per rank and step"),
        Cell("Step, ms", "mean; median"),
    ]
    return Table(
        "Regions",
        heads,
        rows,
        note="Entries: what all ranks selected in a region, which its rank receives and sums; in measured steps. Equal "
        "regions always go through MPI, balanced ones through peer memory where there is any.",
    )


def markdown(table: Table) -> str:
    """The table for a Markdown file."""
    heads = [_one_line(cell) for cell in table.heads]
    rows = [[_one_line(cell) for cell in row] for row in table.rows]
    align = ("left", *("right" for _ in heads[1:]))
    return str(tabulate(rows, heads, tablefmt="github", colalign=align, disable_numparse=True))


def _one_line(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return f"{text} ({cell.small})" if cell.small else text


def runs_in_words(group: Group) -> str:
    """How many seeds a group has, and how many of its runs are unfinished."""
    unfinished = sum(not run.complete for run in group.runs)
    seeds = len({run.info.seed for run in group.runs})
    words = f"{seeds} seeds" if seeds > 1 else ""
    if unfinished:
        words += (", " if words else "") + f"{unfinished} of {len(group.runs)} unfinished"
    return words


def _accuracy(row: Figures) -> Cell:
    mean, spread = row["held_out_accuracy"], row["held_out_accuracy_deviation"]
    if mean is None:
        return Cell(MISSING)
    if spread is None:
        return Cell(f"{mean:.2%}", "" if row["complete_runs"] else "so far")
    return Cell(
        f"{mean:.2%} ± {spread * 100:.2f}",
        f"{row['held_out_accuracy_least']:.2%} … {row['held_out_accuracy_largest']:.2%}",
    )


def spread_cell(name: str, group: Group, row: Figures) -> Cell:
    """A figure of method_figures with its deviation and extremes over the seeds."""
    mean, spread = row[name], row[f"{name}_deviation"]
    if mean is None:
        return Cell(MISSING)
    if spread is None:
        return Cell(f"{mean:.4f}", "" if row["complete_runs"] else "so far")
    return Cell(f"{mean:.4f} ± {spread:.4f}", f"{row[f'{name}_least']:.4f} … {row[f'{name}_largest']:.4f}")


def _to_target(row: Figures) -> Cell:
    reached, runs = row["runs_that_reached_it"], row["complete_runs"] or row["runs"]
    if not reached:
        return Cell("not reached")
    share = "" if reached == runs else f"{reached} of {runs} runs; "
    return Cell(f"{row['seconds_to_target']:,.1f} s", f"{share}{row['steps_to_target']:,.0f} steps")


def words_cell(row: Figures) -> Cell:
    """Words of a step, and their share of dense ones."""
    if row["words"] is None:
        return Cell(MISSING)
    share = row["share_of_dense"]
    return Cell(f"{row['words']:,.0f}", "" if share is None else f"{share:.1%} of dense")


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def step_cell(row: Figures) -> Cell:
    """Mean and median of a step."""
    return Cell(milliseconds(row["step_seconds"]), milliseconds(row["step_seconds_median"]))


def _exchange(row: Figures) -> Cell:
    combined = row["part_combined_seconds"]
    return Cell(
        milliseconds(row["part_communication_seconds"]),
        f"+ {milliseconds(combined)} both" if combined else "",
    )


def _data(row: Figures) -> Cell:
    data, step = row["part_data_seconds"], row["step_seconds"]
    return Cell(MISSING if not step else f"{(data or 0.0) / step:.1%}")


def deviation_cell(row: Figures) -> Cell:
    """How far nnz is from k, globally and locally."""
    both = row["global_nnz_deviation"], row["local_nnz_deviation"]
    texts = [MISSING if value is None else f"{value:.1%}" for value in both]
    return Cell(texts[0], "" if both[1] is None else texts[1])


def xi_cell(row: Figures) -> Cell:
    """ξ, mean and largest."""
    if row["xi"] is None:
        return Cell(MISSING)
    return Cell(f"{row['xi']:.2f}", f"{row['xi_largest']:.2f}")


ACCURACY: tuple[Column, ...] = (
    (Cell("Accuracy", "held out, at the end"), lambda group, row: _accuracy(row)),
)
LOSS: tuple[Column, ...] = ((Cell("Loss", "held out, at the end"), partial(spread_cell, "held_out_loss")),)
SPEECH: tuple[Column, ...] = tuple(
    (Cell(head, "held out, at the end"), partial(spread_cell, name)) for name, head in ERROR_RATES.items()
)


def milliseconds(seconds: float | None) -> str:
    """A duration without its unit."""
    return MISSING if seconds is None else f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"
