"""Every table, note and headline of a report, of runs whose figures can be worked out by hand: tables.md beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.report.groups import group_runs
from jobs.report.headline import SlowLinks, headline, sentence
from jobs.report.headline import notes as headline_notes
from jobs.report.summary import read_runs
from jobs.report.write import notes, tables
from tests.golden import same_as
from tests.jobs.report.test_report import DENSE_WORDS, LENGTH, SPARSE_WORDS, K, write_run

STEPS = 50
KINDS = ("train", "sweep", "speed")


def pair(
    folder: Path, name: str, dense: float, oktopk: float, *, seed: int = 0, status: str = "complete"
) -> list[Path]:
    """Runs of both methods whose reductions take so many seconds, beside 4 ms of computing."""
    return [
        write_run(
            folder / f"{method}{name}.h5",
            method=method,
            seed=seed,
            accuracy=accuracy + 0.01 * seed,
            status=status,
            seconds_forward=np.full(STEPS, 0.004),
            seconds_reduction=np.full(STEPS, reduction),
        )
        for method, accuracy, reduction in (("dense", 0.9, dense), ("oktopk", 0.9 - 4 / 773, oktopk))
    ]


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


def headlines(folder: Path) -> str:
    """Measured and not, equal and better, of two seeds, on a machine that was busy."""
    here, slow = pair(folder, "", 0.001, 0.002), pair(folder, "-slow", 0.02, 0.004)
    better = write_run(folder / "better.h5", accuracy=0.95, words=np.full(STEPS, 2 * DENSE_WORDS))
    alike = [write_run(folder / f"{method}-alike.h5", method=method) for method in ("dense", "oktopk")]
    busy = write_run(folder / "busy.h5", seconds_forward=np.full(STEPS, 0.008))
    quiet = write_run(folder / "quiet.h5", seconds_forward=np.full(STEPS, 0.0048))
    unfinished = pair(folder, "-failed", 0.02, 0.004, status="failed")
    parts = []
    for runs, over in (
        (here, SlowLinks(slow)),
        (here, SlowLinks(unfinished, "no namespaces today")),
        (alike, SlowLinks()),
        ([alike[0], better], SlowLinks()),
        (here + pair(folder, "-1", 0.001, 0.002, seed=1), SlowLinks()),
        ([alike[0], busy], SlowLinks()),
        ([alike[0], quiet], SlowLinks()),
        (alike, SlowLinks([alike[0], busy])),
    ):
        groups, others = group_runs(read_runs(runs)), group_runs(read_runs(over.paths))
        found = headline(groups, others, over)
        texts = [f"- {figure.text}" for figure in found]
        parts.append(
            "\n".join([f"{sentence(found)}\n", *texts, "", *headline_notes(found, over, groups, others)])
        )
    return "\n\n".join(parts)


def test_every_table_note_and_headline_is_that_of_the_golden_file(tmp_path: Path) -> None:
    found = []
    for section in (methods, speech, text, speed, headlines):
        (tmp_path / section.__name__).mkdir()
        found.append(f"## {section.__name__.capitalize()}\n\n{section(tmp_path / section.__name__)}\n")
    same_as(Path(__file__).with_name("tables.md"), "\n".join(found), tmp_path)
