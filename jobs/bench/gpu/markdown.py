"""The table of GPUs in Markdown, as the document says it and nothing else: what was met, and what it was made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.format import MISSING, cell_title, ordered, table

OURS = "oktopk"
SHARE = 0.85
"""Least share of the copy's bandwidth that the select kernel is to reach."""
TOPK_TIMES = 6.0
TOPK_LENGTH = 100_000_000
"""torch.topk is to take at least so many times the select kernel's time, from this length on."""
WAITS = 2
"""Most host synchronizations of a regular step."""


def verdict(run: dict[str, Any], name: str = OURS) -> tuple[float | None, bool | None]:
    """How many times a row's mean step goes into the baseline's, and whether that is the target; None where unknown."""
    times = {method["name"]: method["seconds"]["all"]["mean"] for method in run["methods"]}
    if name not in times or run["baseline"] not in times:
        return None, None
    ratio = times[run["baseline"]] / times[name]
    return ratio, None if run["target"] is None else ratio >= run["target"]["at_least"]


def cell_line(run: dict[str, Any]) -> str:
    """One cell in a line, for whoever waits."""
    ratio, met = verdict(run)
    ours = _method(run, OURS)
    mean = MISSING if ours is None else _us(ours["seconds"]["all"]["mean"])
    wanted = "" if run["target"] is None else f", target {run['target']['at_least']:.1f}x: {_met(met)}"
    return f"{cell_title(run)}: {mean} us, {_times(ratio)} of {run['baseline']}{wanted}; took {run['seconds_taken']:.0f} s"


def gpu_tables(content: dict[str, Any]) -> str:
    """All tables of a document of kind "gpu table", in Markdown.

    Raises:
        BenchError: the document is of another kind.
    """
    if content["kind"] != "gpu table":
        raise BenchError(f"the document is a {content['kind']!r}, not a 'gpu table'")
    runs = content["runs"]
    parts = [_heading(content), _targets(runs), *_left_out(runs)]
    parts += [
        _contract(runs),
        _select(runs),
        _on_device(runs),
        _stages(runs, "regular"),
        _stages(runs, "exact"),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(content: dict[str, Any]) -> str:
    runs, versions, gpu = content["runs"], content["versions"], content.get("gpu")
    commit = (content["commit"] or "unknown")[:12]
    state = {True: " with changes", False: "", None: " (as told)" if content["commit"] else ""}[
        content["dirty"]
    ]
    ranks = runs[0]["ranks"]
    library = content["mpi"].split(",")[0]
    where = content["machine"]["cpu"]
    software = [f"{name} {versions[name]}" for name in ("torch", "mpi4py", "numpy") if name in versions]
    if gpu is not None:
        where = f"{ranks} ranks, {runs[0]['ranks_per_device']} to a GPU, {gpu['count']} x {gpu['name']}"
        software = [
            f"driver {gpu['driver']}",
            f"CUDA {_cuda(gpu['runtime_cuda'])}",
            f"CuPy {gpu['cupy']}",
            f"NCCL {gpu['nccl']}",
            *software,
            *([f"UCX {gpu['ucx']}"] if gpu["ucx"] else []),
        ]
    done = f"{len(runs)} of {content['cells']} cells, " if len(runs) < content["cells"] else ""
    taken = sum(run["seconds_taken"] for run in runs)
    return (
        f"{where}; {', '.join(software)}; {library}; commit {commit}{state}, {content['date']}; "
        f"{done}{taken:.0f} s. `{content['command']}`"
    )


def _targets(runs: Sequence[dict[str, Any]]) -> str:
    """Microseconds, slowest rank; all ratios are to NCCL's mean in the same run, of the gradients' own type."""
    rows = []
    for run in runs:
        ours = _method(run, OURS)
        seconds = None if ours is None else ours["seconds"]
        ratio, met = verdict(run)
        rows.append(
            [
                cell_title(run),
                *(MISSING if found is None else _us(found["seconds"]["all"]["mean"]) for found in _nccl(run)),
                *(_of(seconds, kind, which) for kind, which in _SHOWN),
                _times(ratio),
                MISSING if run["target"] is None else f"≥ {run['target']['at_least']:.1f}x",
                _met(met),
                _times(verdict(run, "oktopk-into-g")[0]),
                _times(verdict(run, "oktopk-mpi")[0]),
            ]
        )
    kinds = [f"{kind if kind != 'all' else 'every step'}: {which}" for kind, which in _SHOWN]
    headers = ["step, us", "NCCL fp32: mean", "NCCL bf16: mean", *(f"Ok-Topk, {kind}" for kind in kinds)]
    return table(rows, [*headers, "times NCCL's", "target", "", "into g", "MPI alone"], "pipe")


_SHOWN = (("all", "mean"), ("regular", "median"), ("exact", "median"))


def _contract(runs: Sequence[dict[str, Any]]) -> str:
    """What the contract asks of every step besides its time."""
    rows = []
    for run in runs:
        ours = _method(run, OURS)
        if ours is None:
            continue
        nnz, growth, bounds = ours["nnz"], ours["memory"]["regular"], run["bounds"]
        waits = None if growth is None else growth.get("synchronizations")
        rows.append(
            [
                cell_title(run),
                f"{ours['words']['mean']:,.0f}",
                f"{bounds['lower']:,.0f} … {bounds['upper']:,.0f}",
                _met(ours["words"]["mean"] <= bounds["upper"]),
                f"{nnz['local_deviation']:.2%}",
                f"{nnz['global_deviation']:.2%}",
                MISSING if waits is None else f"{waits} ({_met(waits <= WAITS)})",
                MISSING if growth is None else f"{growth['allocated']:,} B",
                MISSING if growth is None or growth["resident"] is None else f"{growth['resident']:,} B",
                "yes" if ours["agreed"] else "NO",
            ]
        )
    headers = ["Ok-Topk", "words", "2k(P−1)/P … 6k(P−1)/P", "", "selected/k − 1", "applied/k − 1"]
    headers += ["waits, regular step", "allocated, regular step", "GPU grew", "ranks agree"]
    return table(rows, headers, "pipe")


def _select(runs: Sequence[dict[str, Any]]) -> str:
    """The select kernel alone, beside the copy's bandwidth and torch.topk."""
    rows = []
    for run in runs:
        select = run["select"]
        if select is None:
            continue
        topk = select["topk_seconds"]
        times = None if topk is None else topk / select["seconds"]
        asked = run["length"] >= TOPK_LENGTH and times is not None
        rows.append(
            [
                cell_title(run),
                _us(select["seconds"]),
                f"{select['bytes'] / 1e6:,.0f}",
                f"{select['bytes'] / select['seconds'] / 1e12:.2f}",
                f"{run['speeds']['memory'] / 1e12:.2f}",
                f"{_down(100 * select['share'], 1):.1f} %",
                f"{_met(select['share'] >= SHARE)}",
                MISSING if topk is None else _us(topk),
                _times(times),
                _met(times >= TOPK_TIMES) if asked and times is not None else MISSING,
            ]
        )
    if not rows:
        return ""
    headers = [
        "select kernel alone",
        "us",
        "MB to move",
        "TB/s",
        "copy, TB/s",
        "share",
        f"≥ {100 * SHARE:.0f} %",
    ]
    return table(rows, [*headers, "torch.topk, us", "times", f"≥ {TOPK_TIMES:.0f}x"], "pipe")


def _on_device(runs: Sequence[dict[str, Any]]) -> str:
    """Microseconds by stage on the device with the floor in brackets, where a step runs there as a whole."""
    ours = [(run, _method(run, OURS)) for run in runs]
    found = [(run, stages) for run, method in ours if method and (stages := method.get("device_stages"))]
    if not found:
        return ""
    names = list(dict.fromkeys(name for _, stages in found for name in stages))
    rows = []
    for run, stages in found:
        cells = [
            f"{_us(stage['seconds'])} ({MISSING if stage['floor'] is None else _us(stage['floor'])})"
            for stage in (stages[name] for name in names)
        ]
        whole = sum(stage["seconds"] for stage in stages.values())
        rows.append([cell_title(run), *cells, _us(whole)])
    note = (
        "Regular steps on the device, by events between the kernels of some further steps, us: median over the steps, "
        "mean over the ranks (floor). `clear` zeroes the last update; `exchange` waits for the latest rank, `reduce` for all "
        "counts."
    )
    return f"{note}\n\n{table(rows, ['stage', *names, 'all'], 'pipe')}"


def _stages(runs: Sequence[dict[str, Any]], kind: str) -> str:
    """Microseconds by stage with the floor in brackets; one row a cell."""
    found = [(run, method) for run in runs if (method := _method(run, OURS)) and method["stages"][kind]]
    if not found:
        return ""
    names = ordered(dict.fromkeys(name for _, method in found for name in method["stages"][kind]))
    rows = []
    for run, method in found:
        cells = []
        for name in names:
            stage, floor = method["stages"][kind].get(name), method["floors"].get(name)
            cell = MISSING if stage is None else _us(stage["median"])
            cells.append(cell if floor is None or stage is None else f"{cell} ({_us(floor['seconds'])})")
        rows.append([cell_title(run), *cells])
    speeds = [run["speeds"] for run, _ in found]
    note = (
        f"{kind.capitalize()} steps by stage, us: median over the steps of the mean over the ranks (floor). Floors are bytes at "
        f"the speeds of the run: copy {_median(speeds, 'memory') / 1e12:.2f} TB/s, between GPUs "
        f"{_median(speeds, 'wire') / 1e9:.0f} GB/s, a message {_median(speeds, 'message') * 1e6:.1f} us. What `apply` leaves on "
        "the device ends in `finish`."
    )
    return f"{note}\n\n{table(rows, ['stage', *names], 'pipe')}"


def _left_out(runs: Iterable[dict[str, Any]]) -> list[str]:
    reasons = {name: reason for run in runs for name, reason in run["left_out"].items()}
    return [f"Without `{name}`: {reason}." for name, reason in reasons.items()]


def _method(run: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((method for method in run["methods"] if method["name"] == name), None)


def _nccl(run: dict[str, Any]) -> list[dict[str, Any] | None]:
    return [_method(run, name) for name in NCCL_ROWS]


def _median(speeds: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(float(one[name]) for one in speeds)  # "inf" for one rank


def _of(seconds: dict[str, Any] | None, kind: str, which: str) -> str:
    return MISSING if seconds is None or seconds[kind] is None else _us(seconds[kind][which])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _down(value: float, digits: int) -> float:
    """Rounded down: what is shown as met is met."""
    return math.floor(value * 10**digits + 1e-9) / 10**digits


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{_down(ratio, 2):.2f}x"


def _met(met: bool | None) -> str:
    return MISSING if met is None else "met" if met else "missed"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
