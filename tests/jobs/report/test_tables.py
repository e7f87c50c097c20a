"""Tables, notes and figures of reports on runs worked out by hand: tables.md and figures.txt beside this file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.report.write import report
from tests.golden import same_as
from tests.jobs.report.test_report import DENSE_WORDS, LENGTH, SPARSE_WORDS, K, rows, write_run

STEPS = 50
Runs = dict[str, Sequence[Path]]
"""Kind -> run files."""


def methods(folder: Path) -> Runs:
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
            folder / "gtopk.h5",
            method="gtopk",
            steps=10,
            skipped=np.arange(10) == 2,
            status="running",
            local_nnz=np.where(np.arange(10) == 2, 0.0, K),
        ),
        # deviations, bounds and measures are of steps after both warm-ups: at 5, 15, 25 and 35
        write_run(
            folder / "gaussiank.h5",
            method="gaussiank",
            steps=40,
            dense_steps=4,
            k=np.where(np.arange(40) < 4, LENGTH, np.where(ended, K, 10 * K)),
            words=np.where(ended, SPARSE_WORDS, 10 * SPARSE_WORDS),
            words_busiest=np.where(ended, 1.5, 10.0) * SPARSE_WORDS,
            local_nnz=np.where(ended, 1.5 * K, 10 * K),
            xi=(1.0, 2.0, 3.0, 4.0),
            balance=(9.0, 9.0, 1.25, 1.75),
        ),
        # a rank of a union is to select its share of k; no step after the warm-up has bounds
        write_run(
            folder / "union.h5",
            method="union",
            steps=10,
            dense_steps=4,
            k=np.full(10, 10 * K),
            local_nnz=np.full(10, K / 4),
        ),
        write_run(folder / "union-1.h5", method="union", ranks=2, local_nnz=np.full(STEPS, K / 2)),
    ]
    return {"train": runs}


def speech(folder: Path) -> Runs:
    """Two seeds, and a run without steps."""
    found = ((0.70, 0.25), (0.72, 0.21))
    runs = [
        write_run(folder / f"d{seed}.h5", method="dense", seed=seed, accuracy=a, character_error_rate=c)
        for seed, (a, c) in enumerate(found)
    ]
    return {"train": [*runs, write_run(folder / "t.h5", method="topka", steps=0)]}


def text(folder: Path) -> Runs:
    """With control messages and rows, and other densities."""
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
    others = [
        write_run(folder / f"{density}.h5", settings={"density": density}, held_out_loss=loss, **more)
        for density, loss in ((0.05, 0.3), (0.001, 0.6))
    ]
    return {"train": [*runs, *others]}


def speed(folder: Path) -> Runs:
    """Rivals of one method on several ranks, replayed steps, a reduction behind backward, stages one by one."""
    stages = {
        name: np.full(STEPS, value) for name, value in (("select", 2e-3), ("gather and apply", 0.75e-3))
    }
    runs = [
        write_run(
            folder / f"{ranks}-{size}.h5", method="dense-ovlp", ranks=ranks, settings={"bucket_mb": size}
        )
        for ranks in (1, 2)
        for size in (1, 4)
    ]
    runs += [
        write_run(folder / "nccl.h5", method="nccl", ranks=2, cuda_graph=True),
        write_run(folder / "ddp.h5", method="ddp", ranks=2, stages={"allreduce": np.full(STEPS, 3e-6)}),
        write_run(folder / "oktopk.h5", ranks=2, cuda_graph=True, seconds_reduction=np.full(STEPS, 0.003)),
        write_run(folder / "staged.h5", ranks=2, time_stages=True, stages=stages),
        write_run(folder / "kernels.h5", ranks=2, batch=8, stages={"step": np.full(STEPS, 1e-3)}),
    ]
    return {"speed": runs}


def links(folder: Path) -> Runs:
    """Runs on one host, and shorter ones over slow links."""
    here = [write_run(folder / f"{method}.h5", method=method) for method in ("dense", "oktopk")]
    slow = [
        write_run(
            folder / f"{method}-slow.h5", method=method, steps=40, seconds_reduction=np.full(40, seconds)
        )
        for method, seconds in (("dense", 0.02), ("oktopk", 0.004))
    ]
    return {"train": here, "slow": slow}


SECTIONS = {methods: 0.9, speech: 0.691, text: None, speed: None, links: None}
"""Runs -> the accuracy that times are taken to."""


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Runs, float | None]]:
    folders = {each: tmp_path_factory.mktemp(each.__name__) for each in SECTIONS}
    return {each.__name__: (each(folders[each]), target) for each, target in SECTIONS.items()}


def test_tables_notes_and_figures_are_those_of_the_golden_files(
    sections: dict[str, tuple[Runs, float | None]], tmp_path: Path
) -> None:
    rendered, figures = [], []
    for title, (paths, target) in sections.items():
        own = tmp_path / title
        kinds = {"throughput" if kind == "speed" else kind: files for kind, files in paths.items()}
        written = report(kinds.pop("train", ()), own, target=target, **kinds)
        found = [f"### {table.title}\n\n{table.markdown()}\n\n{table.note}" for table in written.tables]
        rendered.append("\n\n".join([f"## {title.capitalize()}", *found, *written.notes]) + "\n")
        figures += [f"## {title}, {path.name}\n\n{columns(path)}\n" for path in sorted(own.glob("*.csv"))]
    same_as(Path(__file__).with_name("tables.md"), "\n".join(rendered), tmp_path)
    same_as(Path(__file__).with_name("figures.txt"), "\n".join(figures), tmp_path)


def columns(path: Path) -> str:
    """A CSV file, a line for each column; numbers to six digits, of long columns the ends."""
    found = rows(path)
    lines = []
    for name in found[0]:
        values = [row[name] for row in found]
        texts = [f"{float(value):.6g}" if is_number(value) else value for value in values]
        shown = texts if len(texts) <= 12 else [*texts[:6], "...", *texts[-6:]]
        if any(texts):
            lines.append(f"{name}: {' | '.join(shown)}")
    return "\n".join(lines)


def is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def test_what_runs_are_about_can_be_worked_out_by_hand(
    sections: dict[str, tuple[Runs, float | None]], tmp_path: Path
) -> None:
    """Some of the golden figures, so that a golden file that was copied by mistake is found."""
    report(sections["methods"][0]["train"], tmp_path)
    found = {row["run"]: row for row in rows(tmp_path / "summary.csv")}
    topka, gaussiank, union = (found[name] for name in ("topka", "gaussiank", "union-1"))
    assert float(topka["words"]) == pytest.approx((5 * DENSE_WORDS + 25 * SPARSE_WORDS) / 30)
    assert float(gaussiank["words"]) == pytest.approx(5.5 * SPARSE_WORDS)
    assert float(gaussiank["words_sparse_steps"]) == SPARSE_WORDS
    assert (gaussiank["dense_steps"], gaussiank["denser_steps"]) == ("4", "16")
    assert [gaussiank[name] for name in ("xi", "region_balance", "words_balance")] == ["3.5", "1.5", "1.5"]
    deviations = [row[f"{side}_nnz_deviation"] for row in (gaussiank, union) for side in ("global", "local")]
    assert deviations == ["0.25", "0.5", "0.25", "0.0"]
    assert found["union"]["lower_bound_words"] == found["union"]["words_sparse_steps"] == ""
    assert found["gtopk"]["local_nnz_deviation"] == "0.0"
