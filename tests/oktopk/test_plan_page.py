"""The tables of docs/plan.md: what is predicted, beside what was measured."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from oktopk.plan import __main__ as command
from oktopk.replay.links import DEVICES, Links, assumed, read
from oktopk.replay.prediction import predict, ring_seconds
from oktopk.replay.recording import Step
from oktopk.settings import Settings
from tests.launched import ROOT

PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
HOSTS = (ROOT / "docs" / "results" / "hosts.md").read_text(encoding="utf-8")
CELLS = (
    (ROOT / "docs" / "results" / "cpu.md")
    .read_text(encoding="utf-8")
    .partition("## Steps between hosts of namespaces, beside their prediction")[2]
)
UPDATES = (ROOT / "docs" / "results" / "updates.md").read_text(encoding="utf-8")
LENGTHS = 14_728_266, 133_547_324, 306_535_400


def off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):.0f} %".replace("-", "−")


def cell(seconds: float, milliseconds: float) -> str:
    return f"{1e3 * seconds:,.2f}, {milliseconds:,.2f}, {off(1e3 * seconds, milliseconds)}"


def compared() -> dict[str, tuple[float, float]]:
    """Title -> seconds predicted from the raw links, and measured, of the page's table."""
    results, n = ROOT / "docs" / "results", 4_000_000
    (run,) = json.loads((results / "plan-steps-100mbit.json").read_text(encoding="utf-8"))["runs"]
    assert (run["length"], run["density"], run["ranks"]) == (n, 0.0125, 4)
    medians = {each["name"]: each["seconds"]["all"]["median"] for each in run["methods"]}

    def predicted(
        links: Links, method: str, density: float, wire: str = "float32", levels: str = "auto"
    ) -> float:
        settings = Settings(density=density, wire=wire, levels=levels)  # type: ignore[arg-type]
        hosts, many = len(links.hosts), links.ranks_per_host
        return predict(
            Step(method, n, hosts, many, settings), links.network(hosts, many), links.kernels
        ).seconds

    links = read(results / "plan-links-100mbit.json")
    rows = {"4 hosts: ring": (ring_seconds(links.network(4, 1), 4, 4 * n), medians["mpi-ring"])}
    rows["4 hosts: Rabenseifner"] = predicted(links, "dense", 1.0, "plain"), medians["dense"]
    rows["4 hosts: Ok-Topk, 1.25 %, float32"] = predicted(links, "oktopk", 0.0125), medians["oktopk"]
    rows["4 hosts: `union`, 1.25 %, float32"] = predicted(links, "union", 0.0125), medians["union"]
    rows["4 hosts: Ok-Topk, 1.25 %, int4"] = (
        predicted(links, "oktopk", 0.0125, "int4"),
        medians["oktopk-flat-int4"],
    )
    for title, name, density in (
        ("8 hosts", "plan-links-100mbit-8-hosts.json", 0.05),
        ("4 hosts of 2 ranks", "plan-links-100mbit-8.json", 0.0125),
    ):
        links = read(results / name)
        steps = json.loads((results / name).read_text(encoding="utf-8"))["steps"]
        took = {step["method"]: step["seconds"] for step in steps}
        if title == "8 hosts":
            rows[f"{title}: Rabenseifner"] = predicted(links, "dense", 1.0, "plain"), took["dense"]
        of = f", {100 * density:g} %, float32"
        rows[f"{title}: Ok-Topk{of}"] = predicted(links, "oktopk", density), took["oktopk"]
        rows[f"{title}: `union`{of}"] = predicted(links, "union", density), took["union"]
    return rows


# how far the tables may be from the raw files, as a share; whole steps of these rows are sent on wires alone
WITHIN = {
    "4 hosts: ring": 0.05,
    "4 hosts: Ok-Topk, 1.25 %, float32": 0.2,
    "4 hosts: `union`, 1.25 %, float32": 0.2,
}


def first_table() -> str:
    table = ["| step | predicted, ms | measured, ms | off |", "|---|---|---|---|"]
    for title, (predicted, measured) in compared().items():
        table.append(
            f"| {title} | {1e3 * predicted:,.1f} | {1e3 * measured:,.1f} | {off(predicted, measured)} |"
        )
    return "\n".join(table)


def test_predicted_and_measured_steps_of_the_page_are_those_of_the_raw_files() -> None:
    assert first_table() in PAGE
    rows = compared()
    for title, share in WITHIN.items():
        predicted, measured = rows[title]
        assert predicted == pytest.approx(measured, rel=share), title


def gpu_table(rate: str, column: int) -> str:
    """All rows of two hosts of two H200; `column` of the measured table has the steps of this rate."""
    lengths = [f"n = {n / 1e6:.1f} M" for n in LENGTHS]
    table = [f"| {' | '.join(['', *lengths])} |", "|---" * 4 + "|"]
    network = assumed(rate, "40us", "cuda").network(2, 2)
    rows = [("NCCL", wire, "dense") for wire in ("float32", "bfloat16")]
    for levels in ("flat", "two levels"):
        rows += [(levels, wire, "oktopk") for wire in ("plain", "float32", "bfloat16", "int8", "int4")]
    for name, wire, method in rows:
        cells = []
        for n in LENGTHS:
            measured = HOSTS.partition(f"| n = {n:,} |")[2].partition("\n\n")[0]
            title = re.escape(f"{name}, {wire}" if method == "dense" else f"{name}, `{wire}`")
            row = re.search(rf"^\| {title} \|(.*)\|$", measured, re.MULTILINE)
            assert row, title
            taken = re.match(r" ([\d.,]+)", row[1].split("|")[column])
            if taken is None:
                continue  # it was not run
            if method == "dense":
                seconds = ring_seconds(network, 2, {"float32": 4, "bfloat16": 2}[wire] * n)
            else:
                chosen: dict[str, Any] = {"wire": wire, "levels": "hosts" if name != "flat" else name}
                step = Step("oktopk", n, 2, 2, Settings(density=0.01, **chosen))
                seconds = predict(step, network, DEVICES["cuda"]).seconds
            cells.append(cell(seconds, float(taken[1].replace(",", ""))))
        if cells:
            table.append(f"| {name}, `{wire}` | {' | '.join(cells)} |")
    return "\n".join(table)


def cpu_table() -> str:
    table = ["| | 1 Gb/s | 100 Mb/s |", "|---|---|---|"]
    measured = HOSTS.partition("## Four hosts of two ranks")[2]
    for name, levels, wire in (
        ("flat, plain entries", "flat", "plain"),
        ("two levels, plain", "hosts", "plain"),
        ("two levels, `float32`", "hosts", "float32"),
        ("two levels, `int4`", "hosts", "int4"),
    ):
        row = re.search(rf"^\| {name}.*$", measured, re.MULTILINE)
        assert row, name
        times = [float(each) for each in re.findall(r"([\d.]+) ms", row[0])]
        cells = []
        for rate, milliseconds in (("1gbit", times[0]), ("100mbit", times[2])):  # bursts of 16 KB
            chosen: dict[str, Any] = {"wire": wire, "levels": levels}
            step = Step("oktopk", LENGTHS[0], 4, 2, Settings(density=0.01, **chosen))
            network = assumed(rate, "100us", "cpu").network(4, 2)
            cells.append(cell(predict(step, network, DEVICES["cpu"]).seconds, milliseconds))
        table.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(table)


def updates_table() -> str:
    """Full training steps: the only ones that were measured between hosts."""
    table = ["| | 1 Gb/s | 10 Gb/s |", "|---|---|---|"]
    measured = UPDATES.partition("### Time between hosts")[2]
    compute = re.search(r"^\| computation alone .*\| ([\d.]+) \|$", measured, re.MULTILINE)
    assert compute
    for name, method, density, every in (
        ("updates, 1.25 %, `int4`", "oktopk", 0.0125, 1),
        ("updates, 5 %, `int4`, every 4", "oktopk", 0.05, 4),
        ("`union`, 0.45 %, `int4`, every 4", "union", 0.0045, 4),
    ):
        row = re.search(rf"^\| {re.escape(name)} \|[^|]*\| ([\d.]+) \| ([\d.]+) \|", measured, re.MULTILINE)
        assert row, name
        cells = []
        for rate, milliseconds in zip(("1gbit", "10gbit"), row.groups(), strict=True):
            step = Step(method, 98_000_000, 4, 1, Settings(density=density, wire="int4"), updates=True)
            network = assumed(rate, "40us", "cuda").network(4, 1)
            seconds = predict(step, network, DEVICES["cuda"]).seconds / every + float(compute[1]) / 1e3
            cells.append(cell(seconds, float(milliseconds)))
        table.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(table)


TABLES = {
    "GPUs, 10 Gb/s": lambda: gpu_table("9gbit", 3),
    "GPUs, 25 Gb/s": lambda: gpu_table("22.5gbit", 5),
    "CPUs": cpu_table,
    "training": updates_table,
}


@pytest.mark.parametrize("name", TABLES)
def test_steps_of_other_pages_are_predicted_as_the_page_says(name: str) -> None:
    assert TABLES[name]() in PAGE


def errors_of(table: str, every: bool = True) -> list[int]:
    """Percent of all cells of a table, or of sparse rows alone."""
    rows = [row for row in table.splitlines() if every or not re.search("ring|Rabenseifner|NCCL", row)]
    return [int(each.replace("−", "-")) for row in rows for each in re.findall(r"(−?\d+) %(?= \|)", row)]


def tables() -> list[str]:
    """As they are on the page: of the first, GPUs at both rates, CPUs, and training steps."""
    shown = PAGE.partition("### Checked against steps")[2].partition("What was wanted, and what is there")[0]
    found = re.findall(r"(?:^\|.*\|\n)+", shown, re.MULTILINE)
    assert len(found) == 5
    return found


def choices() -> list[float]:
    """Of each n and link: what was measured of the row that settings="auto" takes, over the least of those that it may take."""
    rates = []
    for table in tables()[1:4]:
        rows = [
            row for row in table.splitlines() if re.match(r"\| (flat|two levels), `?(plain|float32)", row)
        ]
        columns = zip(*(row.strip("|").split("|")[1:] for row in rows), strict=True)
        for column in columns:
            pairs = [
                [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\d\.\d+", cell)]
                for cell in column
            ]
            rates.append(min(pairs)[1] / min(measured for _, measured in pairs))
    return rates


def test_the_page_says_how_often_settings_auto_would_take_the_fastest() -> None:
    found = choices()
    right, longer = sum(rate == 1 for rate in found), f"{100 * (max(found) - 1):.0f} % longer"
    assert f"in {right} of {len(found)} groups above the fastest as measured, in the other {longer}" in PAGE


def median(errors: list[int]) -> str:
    return f"{statistics.median(map(abs, errors)):g} %"


def test_the_page_and_the_plan_say_how_large_errors_are() -> None:
    first, ten, more, cpus, training = tables()
    of_all, of_sparse = median(errors_of(first)), median(errors_of(first, False))
    assert f"| all ten rows: {of_all}; the seven sparse ones: {of_sparse} | missed |" in PAGE
    assert f"| 10 Gb/s: {median(errors_of(ten))}; 25 Gb/s: {median(errors_of(more))} |" in PAGE
    assert f"| the same, training steps | {median(errors_of(training))} | missed |" in PAGE
    sparse = [error for table in (first, ten, more, cpus, training) for error in errors_of(table, False)]
    rows = re.findall(r"^\| \d+, [\d.]+ Gb/s.*\|$", CELLS, re.MULTILINE)
    later = [
        errors_of(re.sub(r"^(\|[^|]*\|)[^|]*\|", r"\1", row)) for row in rows
    ]  # dense is the second cell
    assert [len(errors) for errors in later] == [2] * 12
    sparse += [error for errors in later for error in errors]
    said = re.search(r"in (\d+) of (\d+) comparisons with measured ones, by up to (\d+) %", command.TOO_SHORT)
    assert said and [int(each) for each in said.groups()] == [
        sum(error < 0 for error in sparse),
        len(sparse),
        -min(sparse),
    ]
