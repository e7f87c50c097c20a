"""Draws what each rank did when, from the times in a run file: a file for Perfetto and a page.

    python -m jobs.launch -n 4 -m jobs.train CONFIG.toml --set run.timeline=true run.file=runs/vgg.h5
    python -m jobs.timeline runs/vgg.h5 -o vgg

writes vgg.json.gz, Chrome's trace events, to be opened at ui.perfetto.dev or in chrome://tracing, and vgg.html, a page that needs
no network. Both names are printed, with the rank that the others wait for, what of a reduction in buckets (reduction.overlap) is
hidden behind the backward pass and what is exposed, and the share of time that the recorded spans explain. The steps are 10 after
the first 10, or what run.timeline_after and run.timeline_steps say.

Phases are measured by device events on a GPU; stages and buckets by the host's clock, where it begins them and waits for them.
With run.time_stages stages of a GPU have the lengths that its events give. Clocks of ranks are compared once, when training
begins.

Exit status: 0; 2 when the run file cannot be read or has no timeline, or the output cannot be written.
"""

from __future__ import annotations

import gzip
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.command import command_parser, escaped, show
from data.durable import replaced
from jobs.render.style import COLOURS, GREY, STAGES
from jobs.run.columns import BETWEEN, BUCKET, PHASES, Columns
from jobs.run.file import RunFileError
from jobs.run.probe import check_readable
from jobs.run.reader import DAMAGE, RunReader
from jobs.run.spans import explained, exposed_seconds, overlap_seconds, phase_seconds, rows_of, slow_rank

STEPS_SHOWN = 3
WIDTH, ROW, STAGE_ROW, BUCKET_ROW = 1400, 22, 12, 10  # pixels of the picture
EXPOSED = "#DD0000"

_COLOURS = {
    **dict(zip(PHASES, (COLOURS[4], COLOURS[5], COLOURS[0], COLOURS[1], COLOURS[2]), strict=True)),
    **dict.fromkeys((*BETWEEN, "wait"), GREY),
    BUCKET: "#dddddd",
}


def read_timeline(path: Path) -> tuple[Columns, str]:
    """The columns of the timeline, `name` as text, and the run in words. Raises RunFileError: it cannot be read or has none."""
    check_readable(path)  # HDF5 may hang or crash on a damaged file
    try:
        with RunReader(path) as reader:
            spans, info = reader.timeline(), reader.info
    except DAMAGE as error:
        raise RunFileError(f"{path} is damaged: {error}") from error
    if not len(spans["step"]):
        raise RunFileError(
            f"{path} has no timeline: train with --set run.timeline=true for more than run.timeline_after steps"
        )
    spans["name"] = np.char.decode(spans["name"], errors="backslashreplace")
    return spans, f"{path.name}: {info.method} on {info.ranks} ranks, {info.host}, {info.started}"


def trace(spans: Columns, title: str) -> dict[str, Any]:
    """Chrome's trace events: a process for each rank, with threads of steps, what is done between them, stages, and each bucket.

    Source: "Trace Event Format", complete events ("X") in microseconds.
    """
    events: list[dict[str, Any]] = []
    threads = ["steps", "between steps", "stages", *(f"bucket {n}" for n in range(spans["bucket"].max() + 1))]
    for rank in np.unique(spans["rank"]).tolist():
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(threads):
            thread_name = {"ph": "M", "name": "thread_name", "args": {"name": name}}
            events.append(thread_name | {"pid": rank, "tid": thread})
    exposed = exposed_seconds(spans)
    for place, (step, rank, name, depth, start, seconds, bucket) in enumerate(rows_of(spans)):
        thread = 1 if name in BETWEEN else 3 + bucket if bucket >= 0 else 2 * (depth > 0)
        args = {"step": step} | ({"exposed ms": 1e3 * exposed[place]} if name == BUCKET else {})
        span = {"ph": "X", "pid": rank, "tid": thread, "name": name, "args": args}
        events.append(span | {"ts": 1e6 * start, "dur": 1e6 * seconds})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run": title}}


def summary(spans: Columns) -> list[str]:
    """The slow rank, what is hidden and exposed of buckets, and the share that is explained, in sentences."""
    late = slow_rank(spans)
    said = "No rank is late: none works 10 % longer than the others before its reduction."
    if late is not None:
        said = (
            f"Rank {late.rank} is late: before its reduction it works {1e3 * late.seconds:.2f} ms in a step, the others "
            f"{1e3 * late.others:.2f} ms. It loses most in the phase {late.phase}."
        )
    parts = overlap_seconds(spans)
    if parts is None:
        reduction = phase_seconds(spans)["reduction"].mean()
        hides = f"No buckets are on record: {1e3 * reduction:.2f} ms of reduction in a step are exposed."
    else:
        hidden, exposed = parts
        hides = (
            f"Buckets are reduced for {1e3 * (hidden + exposed):.2f} ms in a step: {1e3 * hidden:.2f} ms hidden behind the "
            f"backward pass, {1e3 * exposed:.2f} ms exposed."
        )
    return [
        said,
        hides,
        f"Recorded spans explain {explained(spans):.1%} of the time, on the rank where they explain least.",
    ]


def page(spans: Columns, title: str, first: int, last: int) -> str:
    """The HTML page: what `summary` says, seconds by phase and by bucket, and the picture of the steps from `first` to `last`."""
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
        f"{bucket_table(spans)}"
        f"<h2>Steps {first} to {last}</h2><p>{legend}</p>{picture(spans, first, last)}</html>\n"
    )


def bucket_table(spans: Columns) -> str:
    """HTML: milliseconds of each bucket, mean over steps and ranks; "" without buckets."""
    buckets, exposed = spans["name"] == BUCKET, exposed_seconds(spans)
    if not buckets.any():
        return ""
    stages = list(dict.fromkeys(spans["name"][spans["depth"] == 2].tolist()))
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in (*stages, "all", "hidden", "exposed"))
    rows = ""
    for bucket in np.unique(spans["bucket"][buckets]):
        own = spans["bucket"] == bucket
        count, whole = (own & buckets).sum(), own & buckets
        sums = [spans["seconds"][own & (spans["name"] == name)].sum() for name in stages]
        all_of_it, late = spans["seconds"][whole].sum(), exposed[whole].sum()
        cells = (1e3 * np.array([*sums, all_of_it, all_of_it - late, late]) / count).tolist()
        rows += f"<tr><td>{bucket}</td>" + "".join(f"<td>{each:.2f}</td>" for each in cells) + "</tr>"
    title = "Milliseconds of each bucket in a step, mean over steps and ranks"
    return f"<h2>{title}</h2><table><tr><th>bucket</th>{heads}</tr>{rows}</table>"


def picture(spans: Columns, first: int, last: int) -> str:
    """SVG: for each rank a row of phases, one of stages and one a bucket, over the time of the steps from `first` to `last`.

    What of a bucket is exposed is underlined.
    """
    shown = (spans["step"] >= first) & (spans["step"] <= last)
    kept = {name: values[shown] for name, values in spans.items()}
    begin = kept["start"].min()
    scale = WIDTH / max((kept["start"] + kept["seconds"]).max() - begin, 1e-9)
    ranks = np.unique(spans["rank"]).tolist()
    tall = ROW + STAGE_ROW + BUCKET_ROW * (kept["bucket"].max() + 1) + 14
    height, exposed = len(ranks) * tall, exposed_seconds(kept)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 70} {height + 20}" font-size="12">'
    ]
    for place, rank in enumerate(ranks):
        parts.append(f'<text x="0" y="{place * tall + 16}">rank {rank}</text>')
    for place, (step, rank, name, depth, start, seconds, bucket) in enumerate(rows_of(kept)):
        top = ranks.index(rank) * tall + bool(depth) * ROW + (bucket >= 0) * (STAGE_ROW + BUCKET_ROW * bucket)
        high = BUCKET_ROW - 2 if bucket >= 0 else STAGE_ROW if depth else ROW - 2
        title = f"rank {rank}, step {step}: {html.escape(name)}{bucket if name == BUCKET else ''}, {1e3 * seconds:.3f} ms"
        bars = [(start, seconds, top, high, colour_of(name))]
        if name == BUCKET:
            late = exposed[place]
            title += f", {1e3 * late:.3f} ms of it exposed"
            bars.append((start + seconds - late, late, top + high, 2, EXPOSED))
        for left, wide, y, rows, colour in bars:
            parts.append(
                f'<rect x="{70 + scale * (left - begin):.2f}" y="{y}" width="{max(scale * wide, 0.05):.2f}" '
                f'height="{rows}" fill="{colour}"><title>{title}</title></rect>'
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
        for path, data in zip(
            written, (content, escaped(page(spans, title, first, last)).encode()), strict=True
        ):
            with replaced(path) as draft:
                draft.write_bytes(data)
    except (RunFileError, OSError) as error:
        show(f"jobs.timeline: {error}", file=sys.stderr)
        return 2
    show("\n".join([*summary(spans), *map(str, written)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
