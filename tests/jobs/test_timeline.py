"""The timeline of a run: every rank's time on one clock, and what of a bucket is exposed."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from jobs.run.columns import BUCKET, PHASES, Columns
from jobs.run.reader import RunReader
from jobs.timeline import exposed_seconds, main, read_timeline
from jobs.train.timing import clock_ahead
from oktopk.results import StageTimer
from tests.launched import PATIENCE, outcome
from tests.tiny_job import run
from tests.tiny_runs import CONFIG, SETTINGS


def spans(*rows: tuple[int, int, str, int, float, float], bucket: Sequence[int] = ()) -> Columns:
    """Columns of (step, rank, name, depth, start, seconds); buckets: of none by default."""
    step, rank, name, depth, start, seconds = zip(*rows, strict=True)
    return {
        "step": np.array(step),
        "rank": np.array(rank),
        "name": np.array(name),
        "depth": np.array(depth),
        "start": np.array(start),
        "seconds": np.array(seconds),
        "bucket": np.array(bucket or [-1] * len(rows)),
    }


def test_a_bucket_is_exposed_after_the_backward_pass() -> None:
    found = spans(
        (1, 0, "backward", 0, 0.0, 0.5),
        (1, 0, "backward", 0, 1.0, 1.0),
        (1, 0, BUCKET, 1, 1.2, 0.4),
        (1, 0, BUCKET, 1, 1.5, 1.0),
        (1, 0, "select", 2, 1.5, 1.0),
        (1, 0, BUCKET, 1, 2.3, 0.7),
        (1, 0, "reduction", 0, 2.0, 1.0),
        bucket=[-1, -1, 0, 1, 1, 2, -1],
    )
    assert exposed_seconds(found) == pytest.approx([0, 0, 0, 0.5, 0.5, 0.7, 0])


@pytest.mark.mpi
def test_clocks_are_compared_with_rank_0s(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(clock_ahead(comm)) < 0.05
    perf_counter = __import__("time").perf_counter
    monkeypatch.setattr("jobs.train.timing.time.perf_counter", lambda: perf_counter() + 100.0 * comm.rank)
    assert clock_ahead(comm) == pytest.approx(100.0 * comm.rank, abs=0.05)


@pytest.mark.mpi
@pytest.mark.timeout(PATIENCE)
def test_the_rank_that_was_slowed_on_purpose_stands_out(
    comm: MPI.Intracomm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder: Path = comm.bcast(tmp_path)
    path = folder / "run.h5"
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
    with RunReader(path) as reader:
        found = reader.timeline()
    found["name"] = np.char.decode(found["name"])
    phases = found["depth"] == 0
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
    if comm.rank == 0:
        written = folder / "out.json.gz"
        assert main([str(path), "-o", str(written)]) == 0
        events = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        for name, own, scale in (("pid", "rank", 1), ("ts", "start", 1e6), ("dur", "seconds", 1e6)):
            assert [event[name] for event in complete] == pytest.approx(scale * found[own])
        assert [event["name"] for event in complete] == found["name"].tolist()
        assert capsys.readouterr().out == f"{written}\n"


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
    found, _ = read_timeline(path)
    ends = found["start"] + found["seconds"]
    wholes = found["name"] == BUCKET
    buckets = set(zip(*(found[key][wholes].tolist() for key in ("step", "rank", "bucket")), strict=True))
    assert buckets == set(itertools.product(range(5, 15), range(comm.size), range(3)))
    for step, rank, bucket in buckets:
        own = (found["step"] == step) & (found["rank"] == rank) & (found["bucket"] == bucket)
        (whole,) = np.flatnonzero(own & wholes)
        stages = own & (found["depth"] == 2)
        assert {"select", "exchange", "allgather"} <= set(found["name"][stages])
        assert (found["start"][stages].min(), ends[stages].max()) == pytest.approx(
            (found["start"][whole], ends[whole])
        )
        assert found["seconds"][stages].sum() == pytest.approx(found["seconds"][whole], abs=1e-6)
    exposed = exposed_seconds(found)[wholes]
    # the thread takes one bucket after the other, the first behind the backward pass
    assert np.all(exposed <= found["seconds"][wholes]) and exposed.sum() < found["seconds"][wholes].sum()
    for rank in range(slow):  # its last bucket waits for the slow rank, whose forward pass is longer
        last = (found["rank"][wholes] == rank) & (found["bucket"][wholes] == 2)
        assert np.any(exposed[last] > 0.005)
    if comm.rank == 0:
        assert main([str(path)]) == 0
        packed = path.with_name("run-timeline.json.gz").read_bytes()
        events = json.loads(gzip.decompress(packed))["traceEvents"]
        threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"bucket 0", "bucket 1", "bucket 2"} <= threads


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


def test_a_run_without_a_timeline_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.jobs.report.test_report import write_run

    assert main([str(write_run(tmp_path / "run.h5"))]) == 2
    assert "run.h5 has no timeline: train with --set run.timeline=true for" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run.h5"]
