"""Tables of the report: methods, throughput, phases and stages of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jobs.config.modes import OVERLAPPED_MODES
from jobs.render.chart import OURS
from jobs.render.table import MISSING, Cell, Column, Form, Table, beside, figure, milliseconds, shown, table
from jobs.report.groups import Group, divided, in_words, reads_text, timed_by_stage
from jobs.report.summary import REST
from jobs.run.columns import PHASES

ERROR_RATES = {"word_error_rate": "WER", "character_error_rate": "CER"}
"""Figures of speech -> their heads."""
_REDUCTION = (
    "Reduction: from the gradients that backward left to the mean that the optimizer sees, selection, exact thresholds and "
    "conversions included"
)
_EXPLAINED = {
    "step": "One stream: selection to applying by kernels, as the host sees it, which does not wait for all of them; the other "
    "stages where they were timed one by one, which costs a little.",
    REST: "Rest: what no stage timed; negative where the host waited in a stage for the backward pass.",
}
"""Stage -> the note on its column."""


def _spread(name: str, percent: bool, group: Group) -> Cell:
    """A figure's mean, with its deviation and extremes over the seeds."""
    mean, spread, values = group.mean(name), group.spread(name), group.values(name)
    form = "{:.2%}".format if percent else "{:.4f}".format
    if spread is None:
        return Cell(shown(mean, form), "" if mean is None or group.counted[0].complete else "so far")
    deviation = f"{100 * spread:.2f}" if percent else form(spread)
    return Cell(f"{shown(mean, form)} ± {deviation}", f"{form(min(values))} … {form(max(values))}")


def groups_table(columns: Sequence[Column], groups: Sequence[Group], title: str, note: str = "") -> Table:
    """A row for each group, that of Ok-Topk bold beside others."""
    others = any(group.method != OURS for group in groups)
    return table(columns, groups, title, note, strong=lambda group: others and group.method == OURS)


def runs_in_words(group: Group) -> str:
    """Number of seeds of a group, and of its unfinished runs."""
    unfinished = sum(not run.complete for run in group.runs)
    seeds = len({run.info.seed for run in group.runs})
    parts = [f"{seeds} seeds"] * (seeds > 1)
    parts += [f"{unfinished} of {len(group.runs)} unfinished"] * (unfinished > 0)
    return ", ".join(parts)


def pair(head: str, first: str, form: Form, second: str, small: Form, below: str) -> Column:
    """A column of two figures, the second one small and left out where it is missing; below: small below the head."""
    return Column(head, beside(figure(first, form), figure(second, small, missing="")), below)


def seconds(head: str, name: str) -> Column:
    """A column of milliseconds, of a figure that ends in "_seconds"."""
    return Column(head, figure(f"{name}_seconds", milliseconds), "ms")


METHOD = Column("Method", lambda group: Cell(group.label, colour=group.colour))
_AT_THE_END = "held out, at the end"
ACCURACY = Column("Accuracy", partial(_spread, "held_out_accuracy", True), _AT_THE_END)
LOSS = Column("Loss", partial(_spread, "held_out_loss", False), _AT_THE_END)
SPEECH = [Column(head, partial(_spread, name, False), _AT_THE_END) for name, head in ERROR_RATES.items()]
WORDS = pair("Words", "words", "{:,.0f}", "share_of_dense", "{:.1%} of dense", "per rank and step")
_RING = "{:.2%} of a bfloat16 ring's"
BYTES = pair("MB", "megabytes", "{:,.1f}", "share_of_bfloat16_ring", _RING, "per rank, the whole run")
STEP = pair("Step, ms", "step_seconds", milliseconds, "step_seconds_median", milliseconds, "mean; median")
DEVIATION = pair(
    "|nnz−k|/k", "global_nnz_deviation", "{:.1%}", "local_nnz_deviation", "{:.1%}", "global; local"
)
XI = pair("ξ", "xi", "{:.2f}", "xi_largest", "{:.2f}", "mean; largest")


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
        spent, steps = group.seconds_to(target), group.steps_to(target)
        result |= {"target": target, "runs_that_reached_it": len(spent)}
        result["seconds_to_target"] = sum(spent) / len(spent) if spent else None
        result["steps_to_target"] = sum(steps) / len(steps) if steps else None
    return result


def methods_table(groups: Sequence[Group], target: float | None = None) -> Table:
    """Accuracy (of speech its error rates, of text its loss too), time to the target, words, times and xi."""
    speech = any(group.values("character_error_rate") for group in groups)
    text = reads_text(groups)
    head = "" if target is None else f"To WER {1 - target:.4g}" if speech else f"To {100 * target:.4g}%"
    columns = [
        METHOD._replace(cell=lambda group: Cell(group.label, runs_in_words(group), group.colour)),
        *(SPEECH if speech else [LOSS, ACCURACY] if text else [ACCURACY]),
        *([] if target is None else [Column(head, partial(_to_target, target), "training time")]),
        WORDS,
        *[BYTES] * text,
        STEP,
        seconds("Compute", "part_compute"),
        seconds("Selection", "part_selection"),
        Column("Exchange", _exchange, "ms"),
        Column("Data", _data, "of a step"),
        DEVIATION,
        XI,
    ]
    evaluated = [run for group in groups for run in group.runs if run.evaluations["step"].size]
    words = max((int(run.evaluations["samples"][-1]) for run in evaluated), default=1)
    heard = f" Error rates are of {words} words: one of them is {1 / words:.4f}." if speech else ""
    seeds = any(len(group.counted) > 1 for group in groups)
    rates = [column.head for column in columns if column in (ACCURACY, LOSS, *SPEECH)]
    spread = f"{', '.join(rates)}: mean over the seeds ± sample standard deviation. " * seeds
    combined = any(group.mean("part_combined_seconds") for group in groups)
    both = "Both: selection and exchange in one stream of kernels. " * combined
    note = f"{spread}Times leave out the first steps, evaluations and measurements. {both}Words: "
    note += f"payload; a share is that of a dense allreduce, 2n(P−1)/P.{heard}"
    return groups_table(columns, groups, "Methods", note)


def _to_target(target: float, group: Group) -> Cell:
    spent, steps, runs = group.seconds_to(target), group.steps_to(target), len(group.counted)
    if not spent:
        return Cell("not reached")
    share = "" if len(spent) == runs else f"{len(spent)} of {runs} runs; "
    return Cell(f"{sum(spent) / len(spent):,.1f} s", f"{share}{sum(steps) / len(steps):,.0f} steps")


def _exchange(group: Group) -> Cell:
    combined = group.mean("part_combined_seconds")
    exchange = shown(group.mean("part_communication_seconds"), milliseconds)
    return Cell(exchange, f"+ {milliseconds(combined)} both" if combined else "")


def _data(group: Group) -> str:
    step = group.mean("step_seconds")
    return f"{(group.mean('part_data_seconds') or 0.0) / step:.1%}" if step else MISSING


def speed_tables(groups: Sequence[Group]) -> list[Table]:
    """Tables of runs that are compared by their speed, for each size of batches."""
    tables = []
    batches = divided(groups, "batch_size")
    for batch, alike in batches.items():
        where = f", batches of {batch}" if len(batches) > 1 else ""
        sizes = divided(alike, "ranks")
        if len(sizes) > 1:
            tables.append(throughput_table([group for group in alike if not timed_by_stage(group)], where))
        widest = sizes[max(sizes)]
        tables += [steps_table(widest, where), stages_table(widest, where)]
    return [each for each in tables if each.rows]


def throughput_table(groups: Sequence[Group], where: str = "") -> Table:
    """Samples per second and step time of each method on each number of ranks; where: what the groups have in common."""
    sizes = divided(groups, "ranks")
    by_place = {(group.label, size): group for size, members in sizes.items() for group in members}
    firsts = {label: group for (label, _), group in reversed(by_place.items())}
    cell = beside(figure("samples_per_second"), figure("step_seconds", "{:.2f} ms", 1e3))

    def on(size: int, group: Group) -> Cell:
        there = by_place.get((group.label, size))
        return Cell(MISSING) if there is None else cell(there)

    columns = [Column(in_words(size, "rank"), partial(on, size), "samples / s") for size in sizes]
    note = "By the mean step, exact steps included; no evaluations in between."
    return groups_table([METHOD, *columns], list(firsts.values())[::-1], f"Throughput{where}", note)


def steps_table(groups: Sequence[Group], where: str = "") -> Table:
    """Phases of a step, and what of them stands beside NCCL's where that was measured.

    Args:
        groups: on one number of ranks, one or more.
        where: what they have in common, in words.
    """
    nccl = next((group for group in groups if group.method == "nccl"), None)

    def beside_nccl(what: str, group: Group) -> str:
        nccls, own = nccl and nccl.mean(f"{what}_seconds"), group.mean(f"{what}_seconds")
        hidden = what == "reduction" and group.method in OVERLAPPED_MODES
        return f"{nccls / own:.2f}" if nccls and own and not hidden else MISSING

    columns = [METHOD, Column("Samples / s", figure("samples_per_second")), STEP]
    columns += [seconds(phase.capitalize(), phase) for phase in (*PHASES[1:], PHASES[0])]
    note = _REDUCTION
    if hidden := list(dict.fromkeys(group.label for group in groups if group.method in OVERLAPPED_MODES)):
        note += f"; what {', '.join(hidden)} do{'es' * (len(hidden) == 1)} behind backward is in backward"
    note += "."
    if nccl is not None:
        columns += [Column("× NCCL", partial(beside_nccl, what), what) for what in ("step", "reduction")]
        note += " × NCCL: how many times faster than one flat allreduce by NCCL in the same type."
    captured = [bool(group.runs[0].config.get("training", {}).get("cuda_graph")) for group in groups]
    eager = ", ".join(group.label for group, is_one in zip(groups, captured, strict=True) if not is_one)
    if any(captured):
        note += f" Steps are replayed as CUDA graphs{f', but for {eager}' if eager else ''}."
    return groups_table(columns, groups, f"A step on {in_words(groups[0].ranks, 'rank')}{where}", note)


def stages_table(groups: Sequence[Group], where: str = "") -> Table:
    """Stages of the reduction's time for each group; groups, where: as steps_table."""

    def spent(stage: str, group: Group) -> float | None:
        seconds = group.mean(f"stage_{stage}_seconds") or 0.0
        return seconds if round(1e3 * seconds, 2) else None  # it would be shown as 0

    def cell(stage: str, group: Group) -> str:
        return shown(spent(stage, group), milliseconds)

    # as they ran, those of the group with the most stages first
    longest = sorted(groups, key=lambda group: -max(len(run.stages) for run in group.runs))
    timed = dict.fromkeys(stage for group in longest for run in group.runs for stage in run.stages)
    stages = [stage for stage in (*timed, REST) if any(spent(stage, group) for group in groups)]
    columns = [
        Column("One stream" if stage == "step" else stage.capitalize(), partial(cell, stage), "ms")
        for stage in stages
    ]
    explained = [text for stage, text in _EXPLAINED.items() if stage in stages]
    overlaps = (group.runs[0].config.get("reduction", {}).get("overlap") for group in groups)
    if any(group.method in OVERLAPPED_MODES for group in groups) or any(overlaps):
        explained.append("Of a reduction behind the backward pass only what is waited for after it.")
    return groups_table(
        [METHOD, *columns],
        [group for group in groups if any(spent(stage, group) for stage in stages)],
        f"The reduction by stage on {in_words(groups[0].ranks, 'rank')}{where}",
        " ".join(["Mean over the steps, exact ones included, and the ranks.", *explained]),
    )
