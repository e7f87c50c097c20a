"""The timeline of a run: every rank's time on one clock, and what of a bucket is exposed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from jobs.run.columns import PHASES, Span
from jobs.run.file import RunFileError
from jobs.train.timing import BUCKET, Event, Trace, clock_ahead, exposed
from oktopk.results import StageTimer
from tests.launched import PATIENCE, outcome
from tests.tiny_job import run
from tests.tiny_runs import CONFIG, SETTINGS


def read(path: Path) -> list[Event]:
    """The events of a trace, whose array lacks its end."""
    return json.loads(path.read_text().rstrip().removesuffix(",") + "]")


def table(path: Path) -> dict[str, np.ndarray]:
    """Columns of the spans, in seconds."""
    spans = [event for event in read(path) if event["ph"] == "X"]
    values = {
        name: [event[key] for event in spans]
        for name, key in (("rank", "pid"), ("thread", "tid"), ("name", "name"))
    }
    values |= {
        name: [event[key] / 1e6 for event in spans] for name, key in (("start", "ts"), ("seconds", "dur"))
    }
    values["step"] = [event["args"]["step"] for event in spans]
    values["exposed"] = [event["args"].get("exposed ms", 0.0) / 1e3 for event in spans]
    return {name: np.array(column) for name, column in values.items()}


def test_a_bucket_is_exposed_after_the_backward_pass() -> None:
    phases = [Span("backward", 0.0, 0.5), Span("backward", 1.0, 1.0), Span("reduction", 2.0, 1.0)]
    buckets = [Span(BUCKET, 1.2, 0.4), Span(BUCKET, 1.5, 1.0), Span(BUCKET, 2.3, 0.7)]
    assert [exposed(phases, bucket) for bucket in buckets] == pytest.approx([0, 0.5, 0.7])
    assert exposed([], buckets[0]) == 0


def test_a_trace_names_threads_once_and_grows(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "run.h5")
    event = {"ph": "X", "pid": 0, "tid": 0, "name": "forward", "ts": 1.0, "dur": 2.0, "args": {"step": 1}}
    trace.append([[event], [event | {"pid": 1, "tid": 4}]])
    trace.append([[event], []])
    found = read(tmp_path / "run-timeline.json")
    assert found.count(event) == 2
    names = {
        (each["pid"], each["tid"]): each["args"]["name"] for each in found if each["name"] == "thread_name"
    }
    assert names == {(0, 0): "steps", (1, 4): "bucket 1"}
    assert len(found) == 3 + 2 * 2
    Trace(tmp_path / "run.h5").append([[event]])  # of a job that goes on
    assert read(trace.path)[0] == event and len(read(trace.path)) == 3
    with pytest.raises(RunFileError, match="no-timeline.json cannot be written"):
        Trace(tmp_path / "nowhere" / "no.h5").append([[event]])


@pytest.mark.mpi
def test_clocks_are_compared_with_rank_0s(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(clock_ahead(comm)) < 0.05
    perf_counter = __import__("time").perf_counter
    monkeypatch.setattr("jobs.train.timing.time.perf_counter", lambda: perf_counter() + 100.0 * comm.rank)
    assert clock_ahead(comm) == pytest.approx(100.0 * comm.rank, abs=0.05)


@pytest.mark.mpi
@pytest.mark.timeout(PATIENCE)
def test_the_rank_that_was_slowed_on_purpose_stands_out(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path: Path = comm.bcast(tmp_path) / "run.h5"
    settings = ["training.steps=24", "training.eval_every=8", "run.timeline=true", "run.flush_every=4"]
    slow = comm.size - 1
    words = [
        str(CONFIG),
        "--set",
        *SETTINGS,
        f"run.file={path}",
        *settings,
        "--",
        "seconds=0.01",
        f"slow={slow}:0.08",
    ]
    status, said = outcome(comm, lambda: run(words, comm))
    assert status == 0, said
    found = table(path.with_name("run-timeline.json"))
    phases = found["thread"] == 0
    for rank in range(comm.size):
        mine = (found["rank"] == rank) & phases
        for phase in PHASES:
            assert found["step"][mine & (found["name"] == phase)].tolist() == list(range(11, 21))
        for name, least in (("between", 10), ("evaluation", 1), ("record", 3)):
            assert (found["name"][found["rank"] == rank] == name).sum() >= least
    # what a rank waits for the others ends at about the same time on all, by the one clock; a machine that is busy delays some
    ends = (found["start"] + found["seconds"])[(found["name"] == "reduction") & phases]
    by_step = [ends[found["step"][(found["name"] == "reduction") & phases] == step] for step in range(11, 21)]
    assert min(np.ptp(each) for each in by_step) < 0.05
    forward = (found["name"] == "forward") & phases
    spent = [np.median(found["seconds"][forward & (found["rank"] == rank)]) for rank in range(comm.size)]
    assert comm.size == 1 or (np.argmax(spent) == slow and spent[slow] > np.median(spent[:slow]) + 0.05)


@pytest.mark.mpi
@pytest.mark.timeout(PATIENCE)
def test_buckets_of_a_run_are_hidden_or_exposed(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path: Path = comm.bcast(tmp_path) / "run.h5"
    settings = [
        *("reduction.overlap=true", "reduction.bucket_mb=0.001", "training.steps=16", "run.timeline=true"),
        *("run.timeline_after=4", "run.timeline_steps=10", "run.measure_every=0", "run.flush_every=5"),
    ]
    slow = comm.size - 1
    faults = ["seconds=0.01", "backward=0.02", f"slow={slow}:0.05"]
    words = [str(CONFIG), "--set", *SETTINGS, f"run.file={path}", *settings, "--", *faults]
    status, said = outcome(comm, lambda: run(words, comm))
    assert status == 0, said
    found = table(path.with_name("run-timeline.json"))
    ends, found["bucket"] = found["start"] + found["seconds"], found["thread"] - 3
    wholes = found["name"] == BUCKET
    buckets = set(zip(*(found[key][wholes].tolist() for key in ("step", "rank", "bucket")), strict=True))
    assert buckets == set(itertools.product(range(5, 15), range(comm.size), range(3)))
    for step, rank, bucket in buckets:
        own = (found["step"] == step) & (found["rank"] == rank) & (found["bucket"] == bucket)
        (whole,) = np.flatnonzero(own & wholes)
        stages = own & ~wholes
        assert {"select", "exchange", "allgather"} <= set(found["name"][stages])
        assert (found["start"][stages].min(), ends[stages].max()) == pytest.approx(
            (found["start"][whole], ends[whole])
        )
        assert found["seconds"][stages].sum() == pytest.approx(found["seconds"][whole], abs=1e-6)
    after = found["exposed"][wholes]
    # the thread takes one bucket after the other, the first behind the backward pass
    assert np.all(after <= found["seconds"][wholes] + 1e-6) and after.sum() < found["seconds"][wholes].sum()
    for rank in range(slow):  # its last bucket waits for the slow rank, whose forward pass is longer
        last = (found["rank"][wholes] == rank) & (found["bucket"][wholes] == 2)
        assert np.any(after[last] > 0.005)


def test_a_stage_is_a_range_that_an_error_ends() -> None:
    calls: list[str] = []
    nvtx = SimpleNamespace(RangePush=calls.append, RangePop=lambda: calls.append("end"))
    timer = StageTimer(nvtx=nvtx)
    with timer.stage("select"):
        pass
    with timer.stage("step", ends=False):
        pass
    with pytest.raises(RuntimeError), timer.stage("exchange"):
        raise RuntimeError
    assert calls == ["select", "end", "step", "end", "exchange", "end"]
    assert [name for name, _, _ in timer.spans] == list(timer.seconds) == ["select"]
