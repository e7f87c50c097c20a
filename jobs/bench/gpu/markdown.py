"""Renders a GPU-table document as Markdown: targets, contract, select kernel, stage times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from jobs.bench.document import BenchError
from jobs.bench.format import (
    MISSING,
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
US = ("{:,.1f}", 1e6)
"""Form and scale of microseconds."""


def verdict(run: Record, name: str = OURS) -> tuple[float | None, bool | None]:
    """The baseline's mean step over a row's, and whether that reaches the target; None where unknown."""
    compared = _of(run)
    times = ratio(*(at(compared, f"of.{row}.seconds.all.mean") for row in (run["baseline"], name)))
    return times, None if times is None or run["target"] is None else times >= run["target"]["at_least"]


def cell_line(run: Record) -> str:
    """One cell in a line, for whoever waits."""
    times, met = verdict(run)
    mean = figure(f"of.{OURS}.seconds.all.mean", *US)(_of(run))
    wanted = "" if run["target"] is None else f", target {run['target']['at_least']:.1f}x: {_met(met)}"
    return f"{cell_title(run)}: {mean} us, {_times(times)} of {run['baseline']}{wanted}; took {run['seconds_taken']:.0f} s"


def gpu_tables(content: Record) -> str:
    """All tables of a document of kind "gpu table", in Markdown.

    Raises:
        BenchError: the document is of another kind.
    """
    if content["kind"] != "gpu table":
        raise BenchError(f"the document is a {content['kind']!r}, not a 'gpu table'")
    runs = [_of(run) for run in content["runs"]]
    reasons = {name: reason for run in runs for name, reason in run["left_out"].items()}
    parts = [
        _heading(content),
        columns_table(_TARGETS, runs, "pipe"),
        *(f"Without `{name}`: {reason}." for name, reason in reasons.items()),
        columns_table(_CONTRACT, [run for run in runs if OURS in run["of"]], "pipe"),
    ]
    if selected := [run for run in runs if run["select"] is not None]:
        parts.append(columns_table(_SELECT, selected, "pipe"))
    parts += [_on_device(runs), *(_stages(runs, kind) for kind in ("regular", "exact"))]
    return "\n\n".join(part for part in parts if part)


def _of(run: Record) -> Record:
    """The run with its methods by name, for paths such as "of.nccl.seconds.all.mean"."""
    return run | {"of": {method["name"]: method for method in run["methods"]}}


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


def _us(seconds: float | None) -> str:
    return shown(seconds, *US)


def _down(value: float, digits: int) -> float:
    """Rounded down: what is shown as met is met."""
    return math.floor(value * 10**digits + 1e-9) / 10**digits


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{_down(ratio, 2):.2f}x"


def _met(met: bool | None) -> str:
    return MISSING if met is None else "met" if met else "missed"


def _waits(run: Record) -> str:
    found = at(run, f"of.{OURS}.memory.regular.synchronizations")
    return MISSING if found is None else f"{found} ({_met(found <= WAITS)})"


def _topk_times(run: Record) -> float | None:
    return ratio(at(run, "select.topk_seconds"), at(run, "select.seconds"))


def _topk_met(run: Record) -> str:
    asked = _topk_times(run) if run["length"] >= TOPK_LENGTH else None
    return _met(None if asked is None else asked >= TOPK_TIMES)


_TARGETS: list[Column] = [
    ("step, us", cell_title),
    ("NCCL fp32: mean", figure("of.nccl.seconds.all.mean", *US)),
    ("NCCL bf16: mean", figure("of.nccl-bf16.seconds.all.mean", *US)),
    ("Ok-Topk, every step: mean", figure(f"of.{OURS}.seconds.all.mean", *US)),
    ("Ok-Topk, regular: median", figure(f"of.{OURS}.seconds.regular.median", *US)),
    ("Ok-Topk, exact: median", figure(f"of.{OURS}.seconds.exact.median", *US)),
    ("times NCCL's", lambda run: _times(verdict(run)[0])),
    ("target", figure("target.at_least", "≥ {:.2f}x")),
    ("", lambda run: _met(verdict(run)[1])),
    ("into g", lambda run: _times(verdict(run, "oktopk-into-g")[0])),
    ("MPI alone", lambda run: _times(verdict(run, "oktopk-mpi")[0])),
]
"""Microseconds, slowest rank; all ratios are to NCCL's mean in the same run, of the gradients' own type."""
_CONTRACT: list[Column] = [
    ("Ok-Topk", cell_title),
    ("words", figure(f"of.{OURS}.words.mean")),
    ("2k(P−1)/P … 6k(P−1)/P", lambda run: "{lower:,.0f} … {upper:,.0f}".format(**run["bounds"])),
    ("", lambda run: _met(at(run, f"of.{OURS}.words.mean") <= run["bounds"]["upper"])),
    ("selected/k − 1", figure(f"of.{OURS}.nnz.local_deviation", "{:.2%}")),
    ("applied/k − 1", figure(f"of.{OURS}.nnz.global_deviation", "{:.2%}")),
    ("waits, regular step", _waits),
    ("allocated, regular step", figure(f"of.{OURS}.memory.regular.allocated", "{:,} B")),
    ("GPU grew", figure(f"of.{OURS}.memory.regular.resident", "{:,} B")),
    ("ranks agree", lambda run: "yes" if at(run, f"of.{OURS}.agreed") else "NO"),
]
"""Words, deviations, waits and allocations against the contract."""
_SELECT: list[Column] = [
    ("select kernel alone", cell_title),
    ("us", figure("select.seconds", *US)),
    ("MB to move", figure("select.bytes", scale=1e-6)),
    ("TB/s", lambda run: shown(run["select"]["bytes"] / run["select"]["seconds"], "{:.2f}", 1e-12)),
    ("copy, TB/s", figure("speeds.memory", "{:.2f}", 1e-12)),
    ("share", lambda run: f"{_down(100 * run['select']['share'], 1):.1f} %"),
    (f"≥ {100 * SHARE:.0f} %", lambda run: _met(run["select"]["share"] >= SHARE)),
    ("torch.topk, us", figure("select.topk_seconds", *US)),
    ("times", lambda run: _times(_topk_times(run))),
    (f"≥ {TOPK_TIMES:.0f}x", _topk_met),
]
"""The select kernel alone, beside the copy's bandwidth and torch.topk."""


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
    found = [(run, stages) for run in runs if (stages := at(run, f"of.{OURS}.device_stages"))]
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
        if stages := at(run, f"of.{OURS}.stages.{kind}"):
            floors = {name: at(run, f"of.{OURS}.floors.{name}.seconds") for name in stages}
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


def _median(speeds: Sequence[Record], name: str) -> float:
    return statistics.median(float(one[name]) for one in speeds)  # "inf" for one rank


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
