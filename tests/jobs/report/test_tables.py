"""Every table and note of a report, of runs whose figures can be worked out by hand: tables.md beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.report.groups import group_runs
from jobs.report.summary import read_runs
from jobs.report.write import notes, tables
from tests.golden import same_as
from tests.jobs.report.test_report import LENGTH, SPARSE_WORDS, K, write_run

STEPS = 50
KINDS = ("train", "sweep", "speed", "slow")


def rendered(target: float | None = None, **paths: Sequence[Path]) -> str:
    """The tables of run files in Markdown, and the notes on those that were trained."""
    runs = {kind: read_runs(paths.get(kind, ())) for kind in KINDS}
    found = tables(runs, target)
    parts = [f"### {table.title}\n\n{table.markdown()}\n\n{table.note}" for table in found]
    return "\n\n".join([*parts, *notes(group_runs(runs["train"]))])


def methods(folder: Path) -> str:
    """Over seeds, one that was interrupted, one with a dense warm-up, one that is going on, one that skipped a step."""
    ended = np.arange(40) >= 20
    runs = [
        write_run(folder / "dense-0.h5", method="dense", accuracy=0.90),
        write_run(folder / "dense-1.h5", method="dense", accuracy=0.92, seed=1),
        write_run(folder / "oktopk-0.h5", accuracy=0.91, xi=(1.0, 1.5, 2.0)),
        write_run(folder / "oktopk-1.h5", accuracy=0.93, seed=1, xi=(1.0, 2.5, 2.0)),
        write_run(folder / "oktopk-2.h5", accuracy=0.10, seed=2, status="interrupted"),
        write_run(folder / "topka.h5", method="topka", steps=30, dense_steps=5),
        write_run(
            folder / "gtopk.h5", method="gtopk", steps=10, skipped=np.arange(10) == 2, status="running"
        ),
        write_run(
            folder / "gaussiank.h5",
            method="gaussiank",
            steps=40,
            dense_steps=4,
            k=np.where(np.arange(40) < 4, LENGTH, np.where(ended, K, 10 * K)),
            words=np.where(ended, SPARSE_WORDS, 10 * SPARSE_WORDS),
        ),
        write_run(folder / "union.h5", method="union", steps=10, dense_steps=4, k=np.full(10, 10 * K)),
    ]
    return rendered(0.9, train=runs)


def speech(folder: Path) -> str:
    """Two seeds, and a run without steps."""
    found = ((0.70, 0.25), (0.72, 0.21))
    runs = [
        write_run(folder / f"d{seed}.h5", method="dense", seed=seed, accuracy=a, character_error_rate=c)
        for seed, (a, c) in enumerate(found)
    ]
    return rendered(0.691, train=[*runs, write_run(folder / "t.h5", method="topka", steps=0)])


def text(folder: Path) -> str:
    """With control messages and rows, and another density as a sweep."""
    more: dict[str, Any] = {
        "positions": 512,
        "control_words": np.full(STEPS, 15.0),
        "row_bytes": np.full(STEPS, 8.0),
    }
    runs = [
        write_run(folder / "dense.h5", method="dense", held_out_loss=0.4, **more),
        write_run(folder / "o0.h5", settings={"density": 0.01}, **more),
        write_run(folder / "o1.h5", settings={"density": 0.01}, seed=1, **more),
    ]
    swept = [
        write_run(folder / f"{density}.h5", settings={"density": density}, held_out_loss=loss, **more)
        for density, loss in ((0.05, 0.3), (0.001, 0.6))
    ]
    return rendered(train=runs, sweep=swept)


def speed(folder: Path) -> str:
    """Rivals of one method on several ranks, replayed steps, a reduction behind backward, stages one by one."""
    stages = {
        name: np.full(STEPS, value) for name, value in (("select", 2e-3), ("gather and apply", 0.75e-3))
    }
    runs = [
        write_run(
            folder / f"{ranks}-{rank}.h5", method="powersgd", ranks=ranks, settings={"powersgd_rank": rank}
        )
        for ranks in (1, 2)
        for rank in (1, 4)
    ]
    runs += [
        write_run(folder / "nccl.h5", method="nccl", ranks=2, cuda_graph=True),
        write_run(folder / "ddp.h5", method="ddp", ranks=2, stages={"allreduce": np.full(STEPS, 3e-6)}),
        write_run(folder / "oktopk.h5", ranks=2, cuda_graph=True, seconds_reduction=np.full(STEPS, 0.003)),
        write_run(folder / "staged.h5", ranks=2, time_stages=True, stages=stages),
        write_run(folder / "kernels.h5", ranks=2, batch=8, stages={"step": np.full(STEPS, 1e-3)}),
    ]
    return rendered(speed=runs)


def links(folder: Path) -> str:
    """Runs on one host, and shorter ones over slow links."""
    here = [write_run(folder / f"{method}.h5", method=method) for method in ("dense", "oktopk")]
    slow = [
        write_run(
            folder / f"{method}-slow.h5", method=method, steps=40, seconds_reduction=np.full(40, seconds)
        )
        for method, seconds in (("dense", 0.02), ("oktopk", 0.004))
    ]
    return rendered(train=here, slow=slow)


def test_every_table_and_note_is_that_of_the_golden_file(tmp_path: Path) -> None:
    found = []
    for section in (methods, speech, text, speed, links):
        (tmp_path / section.__name__).mkdir()
        found.append(f"## {section.__name__.capitalize()}\n\n{section(tmp_path / section.__name__)}\n")
    same_as(Path(__file__).with_name("tables.md"), "\n".join(found), tmp_path)
