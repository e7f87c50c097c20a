"""Writes when each rank of a run did what, from the times in a run file, as a trace for Perfetto.

    python -m jobs.launch -n 4 -m jobs.train CONFIG.toml --set run.timeline=true run.file=runs/vgg.h5
    python -m jobs.timeline runs/vgg.h5 -o vgg.json.gz

writes vgg.json.gz, Chrome's trace events, to be opened at ui.perfetto.dev or in chrome://tracing: a process for each rank, with
threads for its steps, for the work between them, for stages, and for each bucket, with what of it is exposed after the backward
pass. A stretch that is selected there has the sums of its spans: a rank that the others wait for has the longest forward and
backward passes, and the shortest reduction. The steps are 10 after the first 10, or what run.timeline_after and
run.timeline_steps say.

Phases are measured by device events on a GPU; stages and buckets by the host's clock, where it begins them and waits for them.
With run.time_stages stages of a GPU have the lengths that its events give. Clocks of ranks are compared once, when training
begins.

Exit status: 0; 2 when the run file cannot be read or has no timeline, or the output cannot be written.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.command import command_parser, show
from data.durable import replaced
from jobs.run.columns import BETWEEN, BUCKET, TIMELINE_COLUMNS, Columns
from jobs.run.file import RunFileError
from jobs.run.reader import DAMAGE, RunReader, check_readable


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


def rows_of(spans: Columns) -> Iterator[tuple[Any, ...]]:
    """The spans one by one, each with its values in the order of TIMELINE_COLUMNS."""
    return zip(*(spans[key].tolist() for key in TIMELINE_COLUMNS), strict=True)


def exposed_seconds(spans: Columns) -> NDArray[np.float64]:
    """float64[spans]: of a bucket, and of a stage of one, what comes after the end of its step's last backward pass; others 0.

    The rest of it is hidden behind the backward pass.
    """
    latest: dict[tuple[int, int], float] = {}
    for step, rank, name, _, start, seconds, _ in rows_of(spans):
        if name == "backward":
            latest[step, rank] = max(start + seconds, latest.get((step, rank), -np.inf))
    keys = zip(spans["step"].tolist(), spans["rank"].tolist(), strict=True)
    backward_ends = np.array([latest.get(key, np.inf) for key in keys])
    ends = spans["start"] + spans["seconds"]
    after = np.maximum(0.0, ends - np.maximum(spans["start"], backward_ends))
    return np.where(spans["bucket"] >= 0, after, 0.0)


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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    title = "Write when each rank of a run did what, as a trace for Perfetto."
    parser = command_parser("jobs.timeline", title, "runs/vgg.h5 -o vgg.json.gz")
    parser.add_argument("run", type=Path, metavar="RUN.h5", help="Run file of a run with run.timeline=true")
    text = "File to write; default: RUN-timeline.json.gz beside the run file"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json.gz", help=text)
    options = parser.parse_args(argv)
    path = options.output or options.run.with_name(f"{options.run.stem}-timeline.json.gz")
    try:
        spans, title = read_timeline(options.run)
        with replaced(path) as draft:
            draft.write_bytes(gzip.compress(json.dumps(trace(spans, title)).encode(), mtime=0))
    except (RunFileError, OSError) as error:
        show(f"jobs.timeline: {error}", file=sys.stderr)
        return 2
    show(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
