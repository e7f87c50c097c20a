"""The tables of a GPU-table document: targets, contract, select kernel, stage times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jobs.bench.document import Run, ordered
from jobs.render.table import MISSING, Block, Column, at, figure, ratio, shown, table

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


def cell_title(run: Run) -> str:
    """Length, density and gradient type of a run, in a few words."""
    length = f"{run['length'] / 1e6:.1f} M" if run["length"] >= 1e6 else f"{run['length']:,}"
    return f"{length}, {100 * run['density']:g} %, {run['gradient_type']}"


def verdict(run: Run, name: str = OURS) -> tuple[float | None, bool | None]:
    """The baseline's mean step over a row's, and whether that reaches the target; None where unknown."""
    compared = _of(run)
    times = ratio(*(at(compared, f"of.{row}.seconds.all.mean") for row in (run["baseline"], name)))
    return times, None if times is None or run["target"] is None else times >= run["target"]["at_least"]


def cell_line(run: Run) -> str:
    """One cell in a line, for whoever waits."""
    times, met = verdict(run)
    mean = figure(f"of.{OURS}.seconds.all.mean", *US)(_of(run))
    wanted = "" if run["target"] is None else f", target {run['target']['at_least']:.1f}x: {_met(met)}"
    return f"{cell_title(run)}: {mean} us, {_times(times)} of {run['baseline']}{wanted}; took {run['seconds_taken']:.0f} s"


def gpu_tables(content: Run) -> list[Block]:
    """All tables of a document of kind "gpu table"."""
    runs = [_of(run) for run in content["runs"]]
    reasons = {name: reason for run in runs for name, reason in run["left_out"].items()}
    parts: list[Block] = [
        _heading(content),
        table(_TARGETS, runs),
        *(f"Without `{name}`: {reason}." for name, reason in reasons.items()),
        table(_CONTRACT, [run for run in runs if OURS in run["of"]]),
    ]
    if selected := [run for run in runs if run["select"] is not None]:
        parts.append(table(_SELECT, selected))
    return [*parts, *_on_device(runs), *_stages(runs, "regular"), *_stages(runs, "exact")]


def _of(run: Run) -> Run:
    """The run with its methods by name, for paths such as "of.nccl.seconds.all.mean"."""
    return run | {"of": {method["name"]: method for method in run["methods"]}}


def _heading(content: Run) -> str:
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


def _waits(run: Run) -> str:
    found = at(run, f"of.{OURS}.memory.regular.synchronizations")
    return MISSING if found is None else f"{found} ({_met(found <= WAITS)})"


def _topk_times(run: Run) -> float | None:
    return ratio(at(run, "select.topk_seconds"), at(run, "select.seconds"))


def _topk_met(run: Run) -> str:
    asked = _topk_times(run) if run["length"] >= TOPK_LENGTH else None
    return _met(None if asked is None else asked >= TOPK_TIMES)


_TARGETS = [
    Column("step, us", cell_title),
    Column("NCCL fp32: mean", figure("of.nccl.seconds.all.mean", *US)),
    Column("NCCL bf16: mean", figure("of.nccl-bf16.seconds.all.mean", *US)),
    Column("Ok-Topk, every step: mean", figure(f"of.{OURS}.seconds.all.mean", *US)),
    Column("Ok-Topk, regular: median", figure(f"of.{OURS}.seconds.regular.median", *US)),
    Column("Ok-Topk, exact: median", figure(f"of.{OURS}.seconds.exact.median", *US)),
    Column("times NCCL's", lambda run: _times(verdict(run)[0])),
    Column("target", figure("target.at_least", "≥ {:.2f}x")),
    Column("", lambda run: _met(verdict(run)[1])),
    Column("into g", lambda run: _times(verdict(run, "oktopk-into-g")[0])),
    Column("MPI alone", lambda run: _times(verdict(run, "oktopk-mpi")[0])),
]
"""Microseconds, slowest rank; all ratios are to NCCL's mean in the same run, of the gradients' own type."""
_CONTRACT = [
    Column("Ok-Topk", cell_title),
    Column("words", figure(f"of.{OURS}.words.mean")),
    Column("2k(P−1)/P … 6k(P−1)/P", lambda run: "{lower:,.0f} … {upper:,.0f}".format(**run["bounds"])),
    Column("", lambda run: _met(at(run, f"of.{OURS}.words.mean") <= run["bounds"]["upper"])),
    Column("selected/k − 1", figure(f"of.{OURS}.nnz.local_deviation", "{:.2%}")),
    Column("applied/k − 1", figure(f"of.{OURS}.nnz.global_deviation", "{:.2%}")),
    Column("waits, regular step", _waits),
    Column("allocated, regular step", figure(f"of.{OURS}.memory.regular.allocated", "{:,} B")),
    Column("GPU grew", figure(f"of.{OURS}.memory.regular.resident", "{:,} B")),
    Column("ranks agree", lambda run: "yes" if at(run, f"of.{OURS}.agreed") else "NO"),
]
"""Words, deviations, waits and allocations against the contract."""
_SELECT = [
    Column("select kernel alone", cell_title),
    Column("us", figure("select.seconds", *US)),
    Column("MB to move", figure("select.bytes", scale=1e-6)),
    Column("TB/s", lambda run: shown(run["select"]["bytes"] / run["select"]["seconds"], "{:.2f}", 1e-12)),
    Column("copy, TB/s", figure("speeds.memory", "{:.2f}", 1e-12)),
    Column("share", lambda run: f"{_down(100 * run['select']['share'], 1):.1f} %"),
    Column(f"≥ {100 * SHARE:.0f} %", lambda run: _met(run["select"]["share"] >= SHARE)),
    Column("torch.topk, us", figure("select.topk_seconds", *US)),
    Column("times", lambda run: _times(_topk_times(run))),
    Column(f"≥ {TOPK_TIMES:.0f}x", _topk_met),
]
"""The select kernel alone, beside the copy's bandwidth and torch.topk."""


def _stage_cell(name: str, seconds: str, unknown: str = "") -> Callable[[Run], str]:
    """Cells of microseconds of a stage of "by stage" with the floor in brackets; unknown: in place of a missing floor."""

    def cell(run: Run) -> str:
        stage = run["by stage"].get(name)
        text, floor = _us(at(stage, seconds)), at(stage, "floor")
        bracketed = unknown if floor is None else f" ({_us(floor)})"
        return text + bracketed

    return cell


def _by_stage(runs: Sequence[Run], of: Callable[[Run], dict[str, Any] | None]) -> list[Run]:
    """The runs that have stages, with these under "by stage"."""
    return [run | {"by stage": stages} for run in runs if (stages := of(run))]


def _on_device(runs: Sequence[Run]) -> list[Block]:
    """Microseconds by stage on the device with the floor in brackets, where a step runs there as a whole."""
    found = _by_stage(runs, lambda run: at(run, f"of.{OURS}.device_stages"))
    if not found:
        return []
    names = dict.fromkeys(name for run in found for name in run["by stage"])
    columns = [Column("stage", cell_title)]
    columns += [Column(name, _stage_cell(name, "seconds", f" ({MISSING})")) for name in names]
    columns += [Column("all", lambda run: _us(sum(stage["seconds"] for stage in run["by stage"].values())))]
    note = (
        "Regular steps on the device, by events between the kernels of some further steps, us: median over the steps, "
        "mean over the ranks (floor). `clear` zeroes the last update; `exchange` waits for the latest rank, `reduce` for all "
        "counts."
    )
    return [note, table(columns, found)]


def _stages(runs: Sequence[Run], kind: str) -> list[Block]:
    """Microseconds by stage with the floor in brackets; one row a cell."""

    def floored(run: Run) -> dict[str, Any]:
        stages, floors = (at(run, f"of.{OURS}.{path}") or {} for path in (f"stages.{kind}", "floors"))
        return {name: stage | {"floor": at(floors, f"{name}.seconds")} for name, stage in stages.items()}

    found = _by_stage(runs, floored)
    if not found:
        return []
    names = ordered(dict.fromkeys(name for run in found for name in run["by stage"]))
    speeds = [run["speeds"] for run in found]
    note = (
        f"{kind.capitalize()} steps by stage, us: median over the steps of the mean over the ranks (floor). Floors are bytes at "
        f"the speeds of the run: copy {_median(speeds, 'memory') / 1e12:.2f} TB/s, between GPUs "
        f"{_median(speeds, 'wire') / 1e9:.0f} GB/s, a message {_median(speeds, 'message') * 1e6:.1f} us. What `apply` leaves on "
        "the device ends in `finish`."
    )
    columns = [Column("stage", cell_title), *(Column(name, _stage_cell(name, "median")) for name in names)]
    return [note, table(columns, found)]


def _median(speeds: Sequence[Run], name: str) -> float:
    return statistics.median(float(one[name]) for one in speeds)  # "inf" for one rank


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
