"""Renders a GPU-table document as Markdown: targets, contract, select kernel, stage times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.format import (
    MISSING,
    Cell,
    Column,
    Record,
    at,
    cell_title,
    columns_table,
    figure,
    ordered,
    ratio,
    shown,
    table,
)

OURS = "oktopk"
SHARE = 0.85
"""Least share of the copy's bandwidth that the select kernel is to reach."""
TOPK_TIMES = 6.0
TOPK_LENGTH = 100_000_000
"""torch.topk is to take at least so many times the select kernel's time, from this length on."""
WAITS = 2
"""Most host synchronizations of a regular step."""


def verdict(run: Record, name: str = OURS) -> tuple[float | None, bool | None]:
    """The baseline's mean step over a row's, and whether that reaches the target; None where unknown."""
    times = {method["name"]: method["seconds"]["all"]["mean"] for method in run["methods"]}
    if name not in times or run["baseline"] not in times:
        return None, None
    ratio = times[run["baseline"]] / times[name]
    return ratio, None if run["target"] is None else ratio >= run["target"]["at_least"]


def cell_line(run: Record) -> str:
    """One cell in a line, for whoever waits."""
    ratio, met = verdict(run)
    mean = _us(at(_method(run, OURS), "seconds.all.mean"))
    wanted = "" if run["target"] is None else f", target {run['target']['at_least']:.1f}x: {_met(met)}"
    return f"{cell_title(run)}: {mean} us, {_times(ratio)} of {run['baseline']}{wanted}; took {run['seconds_taken']:.0f} s"


def gpu_tables(content: Record) -> str:
    """All tables of a document of kind "gpu table", in Markdown.

    Raises:
        BenchError: the document is of another kind.
    """
    if content["kind"] != "gpu table":
        raise BenchError(f"the document is a {content['kind']!r}, not a 'gpu table'")
    runs = content["runs"]
    parts = [
        _heading(content),
        _targets(runs),
        *_left_out(runs),
        _contract(runs),
        _select(runs),
        _on_device(runs),
    ]
    parts += [_stages(runs, kind) for kind in ("regular", "exact")]
    return "\n\n".join(part for part in parts if part)


def _heading(content: Record) -> str:
    runs, versions, gpu = content["runs"], content["versions"], content.get("gpu")
    commit = (content["commit"] or "unknown")[:12]
    told = " (as told)" if content["commit"] else ""
    state = {True: " with changes", False: "", None: told}[content["dirty"]]
    ranks = runs[0]["ranks"]
    library = content["mpi"].split(",")[0]
    where = content["machine"]["cpu"]
    software = [f"{name} {versions[name]}" for name in ("torch", "mpi4py", "numpy") if name in versions]
    if gpu is not None:
        where = f"{ranks} ranks, {runs[0]['ranks_per_device']} to a GPU, {gpu['count']} x {gpu['name']}"
        cuda = f"driver {gpu['driver']}", f"CUDA {_cuda(gpu['runtime_cuda'])}"
        software = [*cuda, f"CuPy {gpu['cupy']}", f"NCCL {gpu['nccl']}", *software]
        software += [f"UCX {gpu['ucx']}"] if gpu["ucx"] else []
    done = f"{len(runs)} of {content['cells']} cells, " if len(runs) < content["cells"] else ""
    taken = sum(run["seconds_taken"] for run in runs)
    return (
        f"{where}; {', '.join(software)}; {library}; commit {commit}{state}, {content['date']}; "
        f"{done}{taken:.0f} s. `{content['command']}`"
    )


def _targets(runs: Sequence[Record]) -> str:
    """Microseconds, slowest rank; all ratios are to NCCL's mean in the same run, of the gradients' own type."""

    def step(name: str, kind: str, which: str) -> Cell:
        return lambda run: _us(at(_method(run, name), f"seconds.{kind}.{which}"))

    def times(name: str) -> Cell:
        return lambda run: _times(verdict(run, name)[0])

    columns: list[Column] = [("step, us", cell_title)]
    for name, kind in NCCL_ROWS.items():
        columns.append((f"NCCL {'fp32' if kind == 'float32' else 'bf16'}: mean", step(name, "all", "mean")))
    for kind, which in (("all", "mean"), ("regular", "median"), ("exact", "median")):
        title = f"Ok-Topk, {'every step' if kind == 'all' else kind}: {which}"
        columns.append((title, step(OURS, kind, which)))
    columns += [
        ("times NCCL's", times(OURS)),
        ("target", figure("target.at_least", "≥ {:.1f}x")),
        ("", lambda run: _met(verdict(run)[1])),
        ("into g", times("oktopk-into-g")),
        ("MPI alone", times("oktopk-mpi")),
    ]
    return columns_table(columns, runs, "pipe")


def _contract(runs: Sequence[Record]) -> str:
    """Words, deviations, waits and allocations of Ok-Topk against the contract."""

    def ours(path: str, form: str) -> Cell:
        return lambda run: shown(at(_method(run, OURS), path), form)

    def waits(run: Record) -> str:
        found = at(_method(run, OURS), "memory.regular.synchronizations")
        return MISSING if found is None else f"{found} ({_met(found <= WAITS)})"

    columns: list[Column] = [
        ("Ok-Topk", cell_title),
        ("words", ours("words.mean", "{:,.0f}")),
        ("2k(P−1)/P … 6k(P−1)/P", lambda run: "{lower:,.0f} … {upper:,.0f}".format(**run["bounds"])),
        ("", lambda run: _met(at(_method(run, OURS), "words.mean") <= run["bounds"]["upper"])),
        ("selected/k − 1", ours("nnz.local_deviation", "{:.2%}")),
        ("applied/k − 1", ours("nnz.global_deviation", "{:.2%}")),
        ("waits, regular step", waits),
        ("allocated, regular step", ours("memory.regular.allocated", "{:,} B")),
        ("GPU grew", ours("memory.regular.resident", "{:,} B")),
        ("ranks agree", lambda run: "yes" if at(_method(run, OURS), "agreed") else "NO"),
    ]
    return columns_table(columns, [run for run in runs if _method(run, OURS)], "pipe")


def _select(runs: Sequence[Record]) -> str:
    """The select kernel alone, beside the copy's bandwidth and torch.topk."""

    def times(run: Record) -> float | None:
        return ratio(at(run, "select.topk_seconds"), at(run, "select.seconds"))

    def speed(run: Record) -> str:
        return shown(run["select"]["bytes"] / run["select"]["seconds"], "{:.2f}", 1e-12)

    def fast(run: Record) -> str:
        asked = times(run) if run["length"] >= TOPK_LENGTH else None
        return _met(None if asked is None else asked >= TOPK_TIMES)

    columns: list[Column] = [
        ("select kernel alone", cell_title),
        ("us", lambda run: _us(run["select"]["seconds"])),
        ("MB to move", figure("select.bytes", scale=1e-6)),
        ("TB/s", speed),
        ("copy, TB/s", figure("speeds.memory", "{:.2f}", 1e-12)),
        ("share", lambda run: f"{_down(100 * run['select']['share'], 1):.1f} %"),
        (f"≥ {100 * SHARE:.0f} %", lambda run: _met(run["select"]["share"] >= SHARE)),
        ("torch.topk, us", lambda run: _us(run["select"]["topk_seconds"])),
        ("times", lambda run: _times(times(run))),
        (f"≥ {TOPK_TIMES:.0f}x", fast),
    ]
    selected = [run for run in runs if run["select"] is not None]
    return columns_table(columns, selected, "pipe") if selected else ""


def _stage_rows(
    found: Sequence[tuple[Record, Record]], names: Sequence[str], seconds: str
) -> list[list[str]]:
    """Microseconds by stage with the floor in brackets, of (run, stage -> seconds and floor)."""

    def cell(stage: Record | None) -> str:
        text, floor = _us(at(stage, seconds)), at(stage, "floor")
        return text if floor is None else f"{text} ({_us(floor)})"

    return [[cell_title(run), *(cell(stages.get(name)) for name in names)] for run, stages in found]


def _on_device(runs: Sequence[Record]) -> str:
    """Microseconds by stage on the device with the floor in brackets, where a step runs there as a whole."""
    found = [(run, stages) for run in runs if (stages := at(_method(run, OURS), "device_stages"))]
    if not found:
        return ""
    names = list(dict.fromkeys(name for _, stages in found for name in stages))
    rows = []
    for (_, stages), row in zip(found, _stage_rows(found, names, "seconds"), strict=True):
        row[1:] = [text if "(" in text else f"{text} ({MISSING})" for text in row[1:]]
        rows.append([*row, _us(sum(stage["seconds"] for stage in stages.values()))])
    note = (
        "Regular steps on the device, by events between the kernels of some further steps, us: median over the steps, "
        "mean over the ranks (floor). `clear` zeroes the last update; `exchange` waits for the latest rank, `reduce` for all "
        "counts."
    )
    return f"{note}\n\n{table(rows, ['stage', *names, 'all'], 'pipe')}"


def _stages(runs: Sequence[Record], kind: str) -> str:
    """Microseconds by stage with the floor in brackets; one row a cell."""
    found = []
    for run in runs:
        method = _method(run, OURS)
        if stages := at(method, f"stages.{kind}"):
            floors = {name: at(method, f"floors.{name}.seconds") for name in stages}
            found.append((run, {name: stages[name] | {"floor": floors[name]} for name in stages}))
    if not found:
        return ""
    names = ordered(dict.fromkeys(name for _, stages in found for name in stages))
    speeds = [run["speeds"] for run, _ in found]
    note = (
        f"{kind.capitalize()} steps by stage, us: median over the steps of the mean over the ranks (floor). Floors are bytes at "
        f"the speeds of the run: copy {_median(speeds, 'memory') / 1e12:.2f} TB/s, between GPUs "
        f"{_median(speeds, 'wire') / 1e9:.0f} GB/s, a message {_median(speeds, 'message') * 1e6:.1f} us. What `apply` leaves on "
        "the device ends in `finish`."
    )
    return f"{note}\n\n{table(_stage_rows(found, names, 'median'), ['stage', *names], 'pipe')}"


def _left_out(runs: Iterable[Record]) -> list[str]:
    reasons = {name: reason for run in runs for name, reason in run["left_out"].items()}
    return [f"Without `{name}`: {reason}." for name, reason in reasons.items()]


def _method(run: Record, name: str) -> Record | None:
    return next((method for method in run["methods"] if method["name"] == name), None)


def _median(speeds: Sequence[Record], name: str) -> float:
    return statistics.median(float(one[name]) for one in speeds)  # "inf" for one rank


def _us(seconds: float | None) -> str:
    return shown(seconds, "{:,.1f}", 1e6)


def _down(value: float, digits: int) -> float:
    """Rounded down: what is shown as met is met."""
    return math.floor(value * 10**digits + 1e-9) / 10**digits


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{_down(ratio, 2):.2f}x"


def _met(met: bool | None) -> str:
    return MISSING if met is None else "met" if met else "missed"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
