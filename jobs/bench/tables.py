"""Renders a bench document as text: times, traffic, stages."""

from __future__ import annotations

import functools
from collections.abc import Callable

from jobs.bench.document import BENCHES, BenchError, Run, ordered
from jobs.render.table import MISSING, Block, Column, Table, at, figure, over, table, text

REFERENCES = ("mpi", "mpi-ring", "dense", "full")
"""What times are compared with: the first of these that takes part; "full" is an ablation's Ok-Topk as it is."""

NAME = figure("name", "{}")


def run_tables(run: Run, content: Run) -> list[Block]:
    """All tables of one run of a document, with a heading that names the machine and its GPUs."""
    machine, gpu = content["machine"], content.get("gpu")
    gradients = run["gradients"]["name"]
    heading = (
        f"{run['ranks']} rank{'s' * (run['ranks'] > 1)}, n = {run['length']:,}, density {run['density']:g}, k = {run['k']:,}, "
        f"{gradients} gradients, {_course(run)}"
    )
    methods = run["methods"]
    on_gpu = run.get("device") == "cuda"
    heading += f", {run['gradient_type']} on {run['device']}" if on_gpu else ""
    heading += f"\n{machine['cpu']}"
    heading += f", vectors of {machine['vector_bits']} bits" if machine.get("vector_bits") else ""
    if gpu:
        heading += f"\n{gpu['count']} x {gpu['name']}, driver {gpu['driver']}, CuPy {gpu['cupy']}, NCCL {gpu['nccl']}"
    heading += _left_out(run)
    digits = 4 if on_gpu else 2
    times = times_table(methods, run.get("baseline"), digits)
    return [heading, times, traffic_table(methods), *stages_tables(methods, digits)]


def reference(methods: list[Run], baseline: str | None = None) -> Run | None:
    """The entry that times are compared with, None if there is none. `baseline` is a name that goes before all others."""
    by_name = {method["name"]: method for method in methods}
    names = (*([] if baseline is None else [baseline]), *REFERENCES)
    return next((by_name[name] for name in names if name in by_name), None)


def times_table(methods: list[Run], baseline: str | None = None, digits: int = 2) -> Table:
    """Milliseconds of a step, slowest rank."""
    against, ms = reference(methods, baseline), (f"{{:.{digits}f}}", 1e3)
    columns = [
        Column("step, ms", NAME),
        Column("mean", figure("seconds.all.mean", *ms)),
        Column("median", figure("seconds.all.median", *ms)),
        Column("regular: mean", figure("seconds.regular.mean", *ms)),
        Column("median", figure("seconds.regular.median", *ms)),
        Column("exact: mean", figure("seconds.exact.mean", *ms)),
        Column("median", figure("seconds.exact.median", *ms)),
        Column("exact / regular", over("seconds.exact.mean", "seconds.regular.mean")),
        Column(
            f"mean / {against['name'] if against else 'dense'}'s",
            over("seconds.all.mean", "against.seconds.all.mean"),
        ),
    ]
    return table(columns, [method | {"against": against} for method in methods])


def traffic_table(methods: list[Run]) -> Table:
    """Words and messages that a rank sends in a step, and entries."""

    def if_counted(path: str, form: str = "{:,.0f}", missing: str = MISSING) -> Callable[[Run], str]:
        return lambda method: figure(path, form)(method) if method["counted"] else missing

    def by_formula(method: Run) -> str:
        least, most = (figure(f"formulas.{end}")(method) for end in ("least", "most"))
        return least if least == most else f"{least} … {most}"

    columns = [
        Column("words per rank", NAME),
        Column("mean", if_counted("words.mean", missing="not counted")),
        Column("busiest", if_counted("words.busiest")),
        Column("by formula", by_formula),
        Column("bytes to other hosts", if_counted("bytes_between.mean")),
        Column("control", if_counted("control_words.mean")),
        Column("messages", if_counted("messages.mean", "{:.1f}")),
        Column("control", if_counted("control_messages.mean", "{:.1f}")),
        Column("selected", figure("nnz.local")),
        Column("applied", figure("nnz.global")),
        Column("|selected/k − 1|", figure("nnz.local_deviation", "{:.2%}")),
        Column("|applied/k − 1|", figure("nnz.global_deviation", "{:.2%}")),
    ]
    return table(columns, methods)


def stages_tables(methods: list[Run], digits: int = 2) -> list[Table]:
    """Milliseconds of each stage: mean over the ranks / the rank that took least."""

    def cell(kind: str, method: Run, stage: str) -> str:
        mean, least = (at(method, f"stages.{kind}.{stage}.{end}") for end in ("mean", "least"))
        return MISSING if mean is None else f"{1e3 * mean:.{digits}f} / {1e3 * least:.{digits}f}"

    tables = []
    for kind in ("regular", "exact"):
        stages = dict.fromkeys(stage for method in methods for stage in at(method, f"stages.{kind}") or {})
        columns = [Column(f"{kind} steps, ms: mean / least rank", str)]
        columns += [Column(method["name"], functools.partial(cell, kind, method)) for method in methods]
        tables += [table(columns, ordered(stages))] if stages else []
    return tables


_OF_SCRIPTS = {
    "mean": ("seconds.mean", "{:.2f}", 1e3),
    "median": ("seconds.median", "{:.2f}", 1e3),
    "exposed": ("seconds.exposed", "{:.2f}", 1e3),
    "bytes a rank": ("bytes", "{:,.0f}", 1.0),
    "MB a rank": ("bytes.mean", "{:,.2f}", 1e-6),
    "busiest": ("bytes.busiest", "{:,.2f}", 1e-6),
    "memory, MB": ("peak", "{:,.0f}", 1e-6),
}
"""Head -> path, form and scale of a figure that documents of scripts may have."""


def script_table(run: Run) -> list[Block]:
    """Milliseconds of a step and what a rank sends in it, by each contestant of a script beside results."""

    def number(path: str, method: Run) -> float | None:
        value = at(method, path)
        return value if isinstance(value, int | float) else None

    columns = [Column("step, ms", NAME)]
    for head, (path, form, scale) in _OF_SCRIPTS.items():
        if any(number(path, method) is not None for method in run["methods"]):
            columns.append(Column(head, figure(path, form, scale)))
    columns.append(Column("counted", lambda method: "yes" if method["counted"] else "by formula"))
    columns.append(Column("by", _carrier))
    heading = f"{run['ranks']} ranks, {run['backend']} on {run['device']}, {_course(run)}"
    heading += f", {run['network']}" if run["network"] else ""
    return [heading + _left_out(run), table(columns, run["methods"])]


def _carrier(method: Run) -> str:
    """The stages of a method, or what carries its messages."""
    stages = (f"{stage} {1e3 * seconds:.1f}" for stage, seconds in method.get("stages", {}).items())
    return ", ".join(stages) or str(method.get("carrier", ""))


def _course(run: Run) -> str:
    return f"{run['course']['steps']} steps after {run['course']['warmup']} discarded"


def _left_out(run: Run) -> str:
    return "".join(f"\nwithout {name}: {reason}" for name, reason in run.get("left_out", {}).items())


def cells_table(content: Run) -> Table:
    """Microseconds of a step by cell of the GPU table, beside NCCL's."""
    times = {"NCCL fp32": "nccl", "NCCL bf16": "nccl-bf16", "Ok-Topk": "oktopk"}
    columns = [Column("step, us", cell_title)]
    for head, name in times.items():
        columns.append(Column(f"{head}: mean", figure(f"of.{name}.seconds.all.mean", *US)))
    for kind in ("regular", "exact"):
        columns.append(Column(f"{kind}: median", figure(f"of.oktopk.seconds.{kind}.median", *US)))
    # the mean step of NCCL's dense allreduce of the gradients' type over Ok-Topk's
    nccls = over("baseline.seconds.all.mean", "of.oktopk.seconds.all.mean")
    columns.append(Column("times NCCL's", nccls))
    runs = []
    for run in content["runs"]:
        of = {method["name"]: method for method in run["methods"]}
        runs.append(run | {"of": of, "baseline": of.get(run["baseline"])})
    return table(columns, runs)


US = ("{:,.1f}", 1e6)
"""Form and scale of microseconds."""


def cell_title(run: Run) -> str:
    """Length, density and gradient type of a run, in a few words."""
    length = f"{run['length'] / 1e6:.1f} M" if run["length"] >= 1e6 else f"{run['length']:,}"
    return f"{length}, {100 * run['density']:g} %, {run['gradient_type']}"


def document_tables(content: Run) -> str:
    """All tables of a document. Raises BenchError: it is of a kind that has none."""
    kind, runs = content["kind"], content["runs"]
    if kind in ("hook table", "rows table"):
        return text(block for run in runs for block in script_table(run))
    if kind not in BENCHES:
        raise BenchError(f"documents of the kind {kind!r} have no tables here")
    above = [cells_table(content)] if kind == "gpu table" else []
    return text([*above, *(block for run in runs for block in run_tables(run, content))])
