"""Renders a bench document as text: times, traffic, stages with floors, memory; of a sweep, words.

    python -m jobs.bench.tables FILE.json                   the tables of a document again
    python -m jobs.bench.tables FILE.json --into README.md

The second puts them between the lines <!-- FILE.json --> and <!-- end of FILE.json -->.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data.command import command_parser, show
from data.durable import replaced
from jobs.bench.dense_table import dense_table
from jobs.bench.document import BenchError, read
from jobs.bench.format import (
    MISSING,
    Cell,
    Column,
    Record,
    at,
    columns_table,
    figure,
    not_held,
    ordered,
    over,
    shown,
    table,
)
from jobs.bench.gpu.markdown import gpu_tables

REFERENCES = ("mpi", "mpi-rabenseifner", "mpi-ring", "dense", "full")
"""What times are compared with: the first of these that takes part; "full" is an ablation's Ok-Topk as it is."""

NAME = figure("name", "{}")
BUSIER = 1.1
"""The busiest rank is worth a word, or a line, when it sends this times the mean."""


def run_tables(run: Record, machine: Record) -> str:
    """All tables of one run of a document, with a heading that names the processor of the machine."""
    gradients = run["gradients"]["name"]
    heading = (
        f"{run['ranks']} rank{'s' * (run['ranks'] > 1)}, n = {run['length']:,}, density {run['density']:g}, k = {run['k']:,}, "
        f"{gradients} gradients, {_course(run)}"
    )
    methods, link = run["methods"], run.get("link")
    on_gpu = run.get("device") == "cuda"
    heading += f", {run['gradient_type']} on {run['device']}" if on_gpu else ""
    heading += f"\n{machine['cpu']}"
    heading += f", vectors of {machine['vector_bits']} bits" if machine.get("vector_bits") else ""
    heading += _left_out(run)
    digits = 4 if on_gpu else 2
    if link:
        tables = [heading, links_table(run)]
    else:
        times = times_table(methods, run.get("baseline"), digits)
        tables = [heading, times, traffic_table(methods), stages_table(methods, digits)]
    if any(method["memory"]["regular"] for method in methods):
        tables.append(memory_table(methods))
    return "\n\n".join(tables)


def reference(methods: list[Record], baseline: str | None = None) -> Record | None:
    """The entry that times are compared with, None if there is none. `baseline` is a name that goes before all others."""
    by_name = {method["name"]: method for method in methods}
    names = (*([] if baseline is None else [baseline]), *REFERENCES)
    return next((by_name[name] for name in names if name in by_name), None)


def times_table(methods: list[Record], baseline: str | None = None, digits: int = 2) -> str:
    """Milliseconds of a step, slowest rank."""
    against, ms = reference(methods, baseline), (f"{{:.{digits}f}}", 1e3)
    columns: list[Column] = [
        ("step, ms", NAME),
        ("mean", figure("seconds.all.mean", *ms)),
        ("median", figure("seconds.all.median", *ms)),
        ("regular: mean", figure("seconds.regular.mean", *ms)),
        ("median", figure("seconds.regular.median", *ms)),
        ("exact: mean", figure("seconds.exact.mean", *ms)),
        ("median", figure("seconds.exact.median", *ms)),
        ("exact / regular", over("seconds.exact.mean", "seconds.regular.mean")),
        (
            f"mean / {against['name'] if against else 'dense'}'s",
            over("seconds.all.mean", "against.seconds.all.mean"),
        ),
    ]
    return columns_table(columns, [method | {"against": against} for method in methods])


def links_table(run: Record) -> str:
    """Milliseconds of a step between hosts, what a host sends in it, and how long that takes at the rate of its link."""
    link, by_name = run["link"], {method["name"]: method for method in run["methods"]}
    methods = [method | {"of": by_name} for method in run["methods"]]
    ms = "{:,.3f}" if run["device"] == "cuda" else "{:,.1f}"

    def stages(method: Record) -> str:
        found = method["stages"]["regular"] or method["stages"]["all"] or {}
        return ", ".join(f"{stage} {shown(found[stage]['mean'], ms, 1e3)}" for stage in ordered(found))

    columns: list[Column] = [
        ("step, ms", NAME),
        ("mean", figure("seconds.all.mean", ms, 1e3)),
        ("median", figure("seconds.all.median", ms, 1e3)),
        ("bytes a host sends to others", counted("link.host_bytes")),
        ("floor", figure("link.floor", ms, 1e3)),
        ("mean − floor", figure("link.above", ms, 1e3)),
        ("transfer / rate", figure("link.transfer.share", "{:.2f}")),
    ]
    columns += [
        (f"{title} / its", over(f"of.{name}.seconds.all.mean", "seconds.all.mean", "{:.1f}"))
        for name, title in _BETWEEN_HOSTS.items()
        if name in by_name
    ]
    columns.append(("stages of regular steps, mean", stages))
    transfer = link["transfer"]
    heading = f"{run['hosts']} hosts, links: {link['told']}; {transfer['bytes']:,} bytes after a pause took "
    heading += shown(transfer["seconds"], "{:.3f} ms", 1e3)
    heading += "" if transfer["share"] is None else f", {transfer['share']:.2f} of that rate"
    if transfer.get("tcp_seconds"):  # not in earlier documents
        heading += f"; by TCP alone {shown(transfer['tcp_seconds'], '{:.3f} ms', 1e3)}"
        heading += "" if transfer["tcp_share"] is None else f", {transfer['tcp_share']:.2f}"
    fast = [method for method in methods if not method["link"]["transfer"]["holds"]]
    notes = [f"{method['name']}: {not_held(method['link']['transfer'], link['told'])}" for method in fast]
    return "\n\n".join([heading, columns_table(columns, methods), *notes])


_BETWEEN_HOSTS = {"nccl": "NCCL fp32", "nccl-bf16": "NCCL bf16", "mpi-ring": "MPI's ring"}
"""Dense rows that steps between hosts are compared with."""


def traffic_table(methods: list[Record]) -> str:
    """Words and messages that a rank sends in a step, and entries."""

    def if_counted(path: str, form: str = "{:,.0f}", missing: str = MISSING) -> Cell:
        return lambda method: figure(path, form)(method) if method["counted"] else missing

    def by_formula(method: Record) -> str:
        least, most = (figure(f"formulas.{end}")(method) for end in ("least", "most"))
        return least if least == most else f"{least} … {most}"

    columns: list[Column] = [
        ("words per rank", NAME),
        ("mean", if_counted("words.mean", missing="not counted")),
        ("busiest", if_counted("words.busiest")),
        ("by formula", by_formula),
        ("bytes to other hosts", if_counted("bytes_between.mean")),
        ("control", if_counted("control_words.mean")),
        ("messages", if_counted("messages.mean", "{:.1f}")),
        ("control", if_counted("control_messages.mean", "{:.1f}")),
        ("selected", figure("nnz.local")),
        ("applied", figure("nnz.global")),
        ("|selected/k − 1|", figure("nnz.local_deviation", "{:.2%}")),
        ("|applied/k − 1|", figure("nnz.global_deviation", "{:.2%}")),
    ]
    return columns_table(columns, methods)


def stages_table(methods: list[Record], digits: int = 2) -> str:
    """Milliseconds of each stage: mean over the ranks / the rank that took least (floor, mean / floor)."""
    form = f"{{:.{digits}f}}"
    blocks = []
    for kind in ("regular", "exact"):
        stages = dict.fromkeys(stage for method in methods for stage in method["stages"][kind] or {})
        if not stages:
            continue

        def cell(method: Record, stage: str, kind: str = kind) -> str:
            found, floor = at(method, f"stages.{kind}.{stage}"), at(method, f"floors.{stage}.seconds")
            if found is None:
                return MISSING
            text = f"{shown(found['mean'], form, 1e3)} / {shown(found['least'], form, 1e3)}"
            floors = "" if not floor else f", {found['mean'] / floor:.1f}x"
            return text if floor is None else f"{text} ({shown(floor, form, 1e3)}{floors})"

        rows = [[stage, *(cell(method, stage) for method in methods)] for stage in ordered(stages)]
        floors = " (floor, mean / floor)" if any(method.get("floors") for method in methods) else ""
        title = f"{kind} steps, ms: mean / least rank{floors}"
        blocks.append(table(rows, [title, *(method["name"] for method in methods)]))
    return "\n\n".join(blocks)


def memory_table(methods: list[Record]) -> str:
    """Megabytes that a step takes and gives back."""

    def n_sized(method: Record) -> str:
        found = [at(method, f"memory.{kind}.n_sized") for kind in ("regular", "exact")]
        return "yes" if any(found) else MISSING if found == [None, None] else "no"

    columns: list[Column] = [("MB taken", NAME)]
    for kind in ("regular", "exact"):
        columns.append((f"{kind}: allocated", figure(f"memory.{kind}.allocated", "{:.3f}", 1e-6)))
        columns.append(("process grew", figure(f"memory.{kind}.resident", "{:.2f}", 1e-6)))
    return columns_table([*columns, ("n-sized", n_sized)], methods)


def sweep_table(runs: Sequence[Record]) -> str:
    """Words per rank and step against the number of ranks; the busiest rank in brackets where it differs."""
    names = list(dict.fromkeys(method["name"] for run in runs for method in run["methods"]))

    def words(run: Record, name: str) -> str:
        sent = next(method["words"] for method in run["methods"] if method["name"] == name)
        mean, busiest = shown(sent["mean"]), shown(sent["busiest"])
        return f"{mean} ({busiest})" if sent["busiest"] > BUSIER * sent["mean"] else mean

    columns: list[Column] = [
        ("ranks", lambda run: str(run["ranks"])),
        ("2k(P−1)/P", figure("bounds.lower")),
        ("6k(P−1)/P", figure("bounds.upper")),
        *((name, functools.partial(words, name=name)) for name in names),
    ]
    first = runs[0]
    heading = f"words per rank and step (busiest rank), n = {first['length']:,}, density {first['density']:g}"
    return f"{heading}\n\n{columns_table(columns, runs, align='right')}"


def hook_table(run: Record) -> str:
    """Milliseconds of a training step with each communication hook, and what a rank sends."""
    columns: list[Column] = [
        ("step, ms", NAME),
        ("mean", figure("seconds.mean", "{:.2f}", 1e3)),
        ("median", figure("seconds.median", "{:.2f}", 1e3)),
        ("exposed", figure("seconds.exposed", "{:.2f}", 1e3)),
        ("plain-topk's median / its", over("against.seconds.median", "seconds.median")),
        ("exposed / its", over("against.seconds.exposed", "seconds.exposed")),
        ("bytes a rank", counted("bytes")),
        ("by", lambda method: method.get("carrier", "")),
    ]
    return _headed(run, f"n = {run['length']:,}, density {run['density']:g}", columns, "plain-topk")


def rows_table(run: Record) -> str:
    """Milliseconds of a sum of rows by each contestant, by stage, and what a rank sends."""
    columns: list[Column] = [
        ("step, ms", NAME),
        ("median", figure("seconds.median", "{:.1f}", 1e3)),
        ("mean", figure("seconds.mean", "{:.1f}", 1e3)),
        ("median / oktopk-rows'", over("seconds.median", "against.seconds.median")),
        ("MB a rank", counted("bytes.mean", "{:,.2f}", 1e-6)),
        ("busiest", figure("bytes.busiest", "{:,.2f}", 1e-6)),
        ("memory, MB", figure("peak", "{:,.0f}", 1e-6)),
        (
            "stages, ms",
            lambda method: ", ".join(f"{stage} {1e3 * time:.1f}" for stage, time in method["stages"].items()),
        ),
    ]
    table, touched = run["table"], run["touched"]
    what = (
        f"table of {table['rows']:,} x {table['width']} float32, {run['skew']}: {touched['drawn']:,} rows drawn a rank, "
        f"{touched['distinct']:,.0f} distinct, {touched['summed']:,.0f} in the sum"
    )
    return _headed(run, what, columns, "oktopk-rows")


def _headed(run: Record, what: str, columns: list[Column], against: str) -> str:
    """A table of the methods below a heading; each has the one named `against` under that name."""
    compared = next((method for method in run["methods"] if method["name"] == against), None)
    methods = [method | {"against": compared} for method in run["methods"]]
    heading = f"{run['ranks']} ranks, {run['backend']} on {run['device']}, {what}, {_course(run)}"
    heading += f", {run['network']}" if run["network"] else ""
    return f"{heading}{_left_out(run)}\n\n{columns_table(columns, methods)}"


def _course(run: Record) -> str:
    return f"{run['course']['steps']} steps after {run['course']['warmup']} discarded"


def _left_out(run: Record) -> str:
    return "".join(f"\nwithout {name}: {reason}" for name, reason in run.get("left_out", {}).items())


def counted(path: str, form: str = "{:,.0f}", scale: float = 1.0) -> Cell:
    """Cells of a figure that is counted, or else by formula, which is said."""
    return lambda method: figure(path, form, scale)(method) + ("" if method["counted"] else " by formula")


_RUN_TABLES: dict[str, Callable[[Record], str]] = {
    "dense table": dense_table,
    "hook table": hook_table,
    "rows table": rows_table,
}
"""Kind of a document -> the tables of one of its runs."""


def document_tables(content: Record) -> str:
    """All tables of a document."""
    if content["kind"] == "gpu table":
        return gpu_tables(content)
    if content["kind"] == "sweep":
        return sweep_table(content["runs"])
    tables = _RUN_TABLES.get(
        content["kind"], functools.partial(run_tables, machine=content.get("machine", {}))
    )
    return "\n\n".join(map(tables, content["runs"]))


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
    title = "Print the tables of a document of jobs.bench, or put them into a text."
    parser = command_parser("jobs.bench.tables", title, "bench.json", "bench.json --into README.md")
    text = "JSON file that jobs.bench wrote with --json"
    parser.add_argument("document", type=Path, metavar="FILE.json", help=text)
    text = "Text that gets the tables, between its lines <!-- FILE.json --> and <!-- end of FILE.json -->"
    parser.add_argument("--into", type=Path, metavar="FILE.md", help=text)
    given = parser.parse_args(argv)
    try:
        tables = document_tables(read(given.document))
        if given.into is None:
            show(tables)
        else:
            text = given.into.read_text(encoding="utf-8")
            with replaced(given.into) as draft:
                draft.write_text(insert(text, given.document.name, tables), encoding="utf-8")
    except (BenchError, OSError) as error:
        show(f"jobs.bench.tables: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
