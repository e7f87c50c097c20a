"""Draws what each rank did when, from the times in a run file: a file for Perfetto and a page.

    python -m jobs.launch -n 4 -m jobs.train CONFIG.toml --set run.timeline=true run.file=runs/vgg.h5
    python -m jobs.timeline runs/vgg.h5 -o vgg

writes vgg.json.gz, Chrome's trace events, to be opened at ui.perfetto.dev or in chrome://tracing, and vgg.html, a page that needs
no network. Both names are printed, with the rank that the others wait for and the share of time that the recorded spans explain.

Phases are measured by device events on a GPU. Stages of a reduction have their measured lengths, and are laid end to end from
its start. Clocks of ranks are compared once, when training begins.

Exit status: 0; 2 when the run file cannot be read or has no timeline, or the output cannot be written.
"""

from __future__ import annotations

import gzip
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.command import command_parser
from data.durable import replaced
from jobs.report.style import COLOURS, GREY, STAGES
from jobs.run.columns import BETWEEN, PHASES, Columns
from jobs.run.file import RunFileError
from jobs.run.probe import check_readable
from jobs.run.reader import DAMAGE, RunReader

OWN_WORK = ("data", "forward", "backward")
"""Phases in which a rank waits for no other, but where gradients are reduced behind the backward pass."""
LATE = 1.1
"""Times the median of the others that a rank's own work takes, from which on it is named."""
STEPS_SHOWN = 3
WIDTH, ROW, STAGE_ROW = 1400, 22, 12  # pixels of the picture

_COLOURS = {
    **dict(zip(PHASES, (COLOURS[4], COLOURS[5], COLOURS[0], COLOURS[1], COLOURS[2]), strict=True)),
    **dict.fromkeys(BETWEEN, GREY),
}


class SlowRank(NamedTuple):
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        seconds: of its own work in a step, median over the steps.
        others: the median of that over the other ranks.
        phase: in which it loses most.
    """

    rank: int
    seconds: float
    others: float
    phase: str


def read_timeline(path: Path) -> tuple[Columns, str]:
    """The columns of the timeline, `name` as text, and the run in words. Raises RunFileError: it cannot be read or has none."""
    check_readable(path)  # HDF5 may hang or crash on a damaged file
    try:
        with RunReader(path) as reader:
            spans, info = reader.timeline(), reader.info
    except DAMAGE as error:
        raise RunFileError(f"{path} is damaged: {error}") from error
    if not len(spans["step"]):
        raise RunFileError(f"{path} has no timeline: train with --set run.timeline=true")
    spans["name"] = np.char.decode(spans["name"])
    return spans, f"{path.name}: {info.method} on {info.ranks} ranks, {info.host}, {info.started}"


def trace(spans: Columns, title: str) -> dict[str, Any]:
    """Chrome's trace events: a process for each rank, with a thread of steps and one of what is done between them.

    Source: "Trace Event Format", complete events ("X") in microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank in np.unique(spans["rank"]).tolist():
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("steps", "between steps")):
            thread_name = {"ph": "M", "name": "thread_name", "args": {"name": name}}
            events.append(thread_name | {"pid": rank, "tid": thread})
    for step, rank, name, _, start, seconds in zip(*(spans[key].tolist() for key in spans), strict=True):
        span = {"ph": "X", "pid": rank, "tid": int(name in BETWEEN), "name": name, "args": {"step": step}}
        events.append(span | {"ts": 1e6 * start, "dur": 1e6 * seconds})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": title}}


def explained(spans: Columns) -> float:
    """The share of the time from the first span to the end of the last that lies in one of depth 0; the least of all ranks."""
    shares = []
    for rank in np.unique(spans["rank"]):
        own = (spans["rank"] == rank) & (spans["depth"] == 0)
        order = np.argsort(spans["start"][own], kind="stable")
        starts = spans["start"][own][order]
        ends = starts + spans["seconds"][own][order]
        reached = np.maximum.accumulate(np.concatenate([starts[:1], ends[:-1]]))
        covered = np.maximum(0.0, ends - np.maximum(starts, reached)).sum()
        shares.append(covered / max(ends.max() - starts[0], 1e-12))
    return float(min(shares))


def phase_seconds(spans: Columns) -> dict[str, NDArray[np.float64]]:
    """Phase -> float64[ranks]: seconds of it in a step, median over the steps but the first, where there are several."""
    ranks, steps = np.unique(spans["rank"]), np.unique(spans["step"])
    first = steps[1:][0] if len(steps) > 1 else steps[0]
    found = {}
    for phase in PHASES:
        mine = (spans["name"] == phase) & (spans["depth"] == 0) & (spans["step"] >= first)
        sums = np.zeros((len(ranks), len(steps)))
        places = np.searchsorted(ranks, spans["rank"][mine]), np.searchsorted(steps, spans["step"][mine])
        np.add.at(sums, places, spans["seconds"][mine])
        found[phase] = np.median(sums[:, steps >= first], axis=1)
    return found


def slow_rank(spans: Columns) -> SlowRank | None:
    """The rank whose own work takes longest; None where it takes less than LATE times that of the others, or is alone."""
    seconds = phase_seconds(spans)
    ranks = np.unique(spans["rank"])
    own = np.sum([seconds[phase] for phase in OWN_WORK], axis=0)
    if len(ranks) < 2:
        return None
    slowest = int(np.argmax(own))
    others = float(np.median(np.delete(own, slowest)))
    if own[slowest] < LATE * others:
        return None
    lost = {p: seconds[p][slowest] - np.median(np.delete(seconds[p], slowest)) for p in OWN_WORK}
    return SlowRank(int(ranks[slowest]), float(own[slowest]), others, max(lost, key=lost.__getitem__))


def summary(spans: Columns) -> list[str]:
    """The slow rank and the share that is explained, in sentences."""
    late = slow_rank(spans)
    said = "No rank is late: none works 10 % longer than the others before its reduction."
    if late is not None:
        said = (
            f"Rank {late.rank} is late: before its reduction it works {1e3 * late.seconds:.2f} ms in a step, the others "
            f"{1e3 * late.others:.2f} ms. It loses most in the phase {late.phase}."
        )
    return [
        said,
        f"Recorded spans explain {explained(spans):.1%} of the time, on the rank where they explain least.",
    ]


def page(spans: Columns, title: str, first: int, last: int) -> str:
    """The HTML page: what `summary` says, seconds by phase and rank, and the picture of the steps from `first` to `last`."""
    seconds = phase_seconds(spans)
    rows = "".join(
        f"<tr><td>{rank}</td>" + "".join(f"<td>{1e3 * seconds[p][place]:.2f}</td>" for p in PHASES) + "</tr>"
        for place, rank in enumerate(np.unique(spans["rank"]).tolist())
    )
    heads = "".join(f"<th>{phase}</th>" for phase in PHASES)
    text = "".join(f"<p>{html.escape(line)}</p>" for line in summary(spans))
    legend = "".join(
        f'<span style="background:{colour_of(name)}"></span>{html.escape(name)} '
        for name in dict.fromkeys(spans["name"].tolist())
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Timeline</title><style>'
        "body{font:15px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}svg{max-width:100%}"
        "span{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 1em}</style>"
        f"<h1>Timeline</h1><p>{html.escape(title)}</p>{text}"
        f"<h2>Milliseconds of each phase in a step, median over the steps</h2><table><tr><th>rank</th>{heads}</tr>{rows}</table>"
        f"<h2>Steps {first} to {last}</h2><p>{legend}</p>{picture(spans, first, last)}</html>\n"
    )


def picture(spans: Columns, first: int, last: int) -> str:
    """SVG: a row of phases and one of stages for each rank, over the time of the steps from `first` to `last`."""
    shown = (spans["step"] >= first) & (spans["step"] <= last)
    kept = {name: values[shown] for name, values in spans.items()}
    begin = kept["start"].min()
    scale = WIDTH / max((kept["start"] + kept["seconds"]).max() - begin, 1e-9)
    ranks = np.unique(spans["rank"]).tolist()
    height = len(ranks) * (ROW + STAGE_ROW + 14)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 70} {height + 20}" font-size="12">'
    ]
    for place, rank in enumerate(ranks):
        parts.append(f'<text x="0" y="{place * (ROW + STAGE_ROW + 14) + 16}">rank {rank}</text>')
    for step, rank, name, depth, start, seconds in zip(*(kept[key].tolist() for key in kept), strict=True):
        top = ranks.index(rank) * (ROW + STAGE_ROW + 14) + depth * ROW
        parts.append(
            f'<rect x="{70 + scale * (start - begin):.2f}" y="{top}" width="{max(scale * seconds, 0.05):.2f}" '
            f'height="{STAGE_ROW if depth else ROW - 2}" fill="{colour_of(name)}">'
            f"<title>rank {rank}, step {step}: {html.escape(name)}, {1e3 * seconds:.3f} ms</title></rect>"
        )
    parts.append(
        f'<text x="70" y="{height + 12}">0</text>'
        f'<text x="{WIDTH - 20}" y="{height + 12}">{1e3 * WIDTH / scale:.1f} ms</text></svg>'
    )
    return "".join(parts)


def colour_of(name: str) -> str:
    """Colour of a phase, a stage, or work between steps."""
    return _COLOURS.get(name) or STAGES.get(name, GREY)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    title = "Write when each rank of a run did what, as a file for Perfetto and as a page."
    parser = command_parser("jobs.timeline", title, "runs/vgg.h5 -o vgg --first 40")
    parser.add_argument("run", type=Path, metavar="RUN.h5", help="Run file of a run with run.timeline=true")
    text = "Write STEM.json.gz and STEM.html; default: RUN-timeline beside the run file"
    parser.add_argument("-o", "--output", type=Path, metavar="STEM", help=text)
    text = f"First of the {STEPS_SHOWN} steps in the page's picture, at least 1; default: the last that are recorded"
    parser.add_argument("--first", type=int, metavar="STEP", help=text)
    options = parser.parse_args(argv)
    stem = options.output or options.run.with_name(f"{options.run.stem}-timeline")
    try:
        spans, title = read_timeline(options.run)
        steps = np.unique(spans["step"]).tolist()
        first = steps[max(0, len(steps) - STEPS_SHOWN)] if options.first is None else options.first
        if first not in steps:
            raise RunFileError(f"--first {first} is not in [{steps[0]}, {steps[-1]}], the steps on record")
        written = [stem.with_name(f"{stem.name}{end}") for end in (".json.gz", ".html")]
        content = gzip.compress(json.dumps(trace(spans, title)).encode(), mtime=0)
        last = steps[min(len(steps), steps.index(first) + STEPS_SHOWN) - 1]
        for path, data in zip(written, (content, page(spans, title, first, last).encode()), strict=True):
            with replaced(path) as draft:
                draft.write_bytes(data)
    except (RunFileError, OSError) as error:
        print(f"jobs.timeline: {error}", file=sys.stderr)
        return 2
    print("\n".join([*summary(spans), *map(str, written)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
