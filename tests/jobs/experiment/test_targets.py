"""The targets of experiments, compared with runs whose figures are known: claims.md beside this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.experiment.experiments import EXPERIMENTS, Target
from jobs.experiment.report import claims_table, verdicts
from jobs.report.groups import group_runs
from jobs.report.summary import read_runs
from tests.golden import same_as
from tests.jobs.report.test_report import K, write_run

Named = tuple[str, Sequence[Path], Sequence[Path]]
"""What runs show, those that were trained, and those that are compared by their speed."""


def reduced(path: Path, method: str, seconds: float, **more: Any) -> Path:
    """A run whose reductions take so many seconds."""
    return write_run(path, method=method, seconds_reduction=np.full(50, seconds), **more)


def timed(path: Path, method: str, loss: float, seconds: float = 25.0) -> Path:
    """A run whose held-out loss falls from 1 at its first step to `loss` at its end."""
    elapsed = np.linspace(0, seconds, 51)[1:]
    settings = {"threshold_interval": 128}
    return write_run(path, method=method, held_out_loss=loss, elapsed=elapsed, settings=settings)


def vgg(folder: Path) -> list[Named]:
    good = np.full(50, float(K))
    dense = [write_run(folder / f"d{i}.h5", method="dense", seed=i, accuracy=0.9 + 0.01 * i) for i in (0, 1)]
    poor = write_run(folder / "poor.h5", method="dense", accuracy=0.89)
    fine = write_run(folder / "fine.h5", accuracy=0.904, xi=(1.0, 3.9), global_nnz=good)
    bad = write_run(
        folder / "bad.h5",
        accuracy=0.90,
        xi=(1.0, 4.1),
        global_nnz=1.1 * good,
        words=np.full(50, 91.0),
        seconds_data=np.full(50, 0.01),
    )
    unfinished = write_run(folder / "u.h5", accuracy=0.904, xi=(1.0,), status="interrupted")
    nccl, fast, lazy = (
        reduced(folder / f"{name}.h5", method, seconds)
        for name, method, seconds in (
            ("nccl", "nccl", 2e-3),
            ("fast", "oktopk", 1e-3),
            ("lazy", "oktopk", 3e-3),
        )
    )
    return [
        ("all targets are met", [*dense, fine], [nccl, fast]),
        ("all but the first are missed", [*dense, bad], [nccl, lazy]),
        ("dense is poor, and nothing is timed", [poor, fine], []),
        ("nothing to compare with", [fine], [fast]),
        ("a run that is not complete", [*dense, unfinished], []),
    ]


def lstm(folder: Path) -> list[Named]:
    return [
        (
            f"accuracies of {dense} and {oktopk}",
            [
                write_run(folder / f"{method}-{accuracy}.h5", method=method, accuracy=accuracy)
                for method, accuracy in (("dense", dense), ("oktopk", oktopk))
            ],
            [],
        )
        for dense, oktopk in ((0.70, 0.695), (0.72, 0.7001), (0.69, 0.685))
    ]


def bert(folder: Path) -> list[Named]:
    """Losses after equal steps and after equal time; reductions at each size of batches."""
    dense = timed(folder / "dense.h5", "dense", 0.5)
    overlapped = timed(folder / "ovlp.h5", "ddp", 0.5, seconds=10.0)
    found: list[Named] = [("Ok-Topk is missing", [dense], [])]
    for loss, seconds, what in (
        (0.504, 12.5, "in half the time dense is at 0.755"),
        (0.504, 25.0, "after equal time"),
        (0.506, 9.0, "there DDP is at 0.551"),
        (0.400, 40.0, "at 0.4 too late: at 0.635 when dense has ended"),
    ):
        sparse = timed(folder / f"{loss}-{seconds}.h5", "oktopk", loss, seconds)
        found.append((f"{loss} in {seconds} s, {what}", [dense, overlapped, sparse], []))
    settings = {"gradient_type": "bfloat16"}
    # one whose stages are timed is no measure of speed
    fast = [reduced(folder / "staged.h5", "oktopk", 0.009, batch=256, settings=settings, time_stages=True)]
    for batch, own in ((8, 0.0021), (256, 0.0026)):
        for method, seconds in (("nccl", 0.005), ("oktopk", own), ("ddp", 0.001)):
            path = folder / f"{batch}-{method}.h5"
            fast.append(reduced(path, method, seconds, batch=batch, settings=settings))
    return [*found, ("two sizes of batches", [], fast)]


def gpt(folder: Path) -> list[Named]:
    losses = {"dense": 4.0, "oktopk": 5.4, "oktopk-updates": 4.02, "union-updates": 4.05}
    runs = [
        write_run(folder / f"{name}.h5", method=name, held_out_loss=loss) for name, loss in losses.items()
    ]
    return [("each rival", runs, [])]


def test_every_claim_is_golden(tmp_path: Path) -> None:
    parts = []
    sections: list[Callable[[Path], list[Named]]] = [vgg, lstm, bert, gpt]
    for section in sections:
        name = section.__name__
        (tmp_path / name).mkdir()
        for title, *files in section(tmp_path / name):
            claims = verdicts(EXPERIMENTS[name], *(group_runs(read_runs(each)) for each in files))
            parts.append(f"## {name}: {title}\n\n{claims_table(claims).markdown()}\n")
    same_as(Path(__file__).with_name("claims.md"), "\n".join(parts), tmp_path)


def test_every_target_has_a_verdict_where_all_was_measured(tmp_path: Path) -> None:
    trained = [timed(tmp_path / f"{method}.h5", method, 0.5) for method in ("dense", "ddp", "oktopk-updates")]
    trained.append(write_run(tmp_path / "measured.h5", accuracy=0.9, xi=(1.0, 2.0), held_out_loss=0.5))
    fast = [
        write_run(tmp_path / f"fast-{method}.h5", method=method, settings={"gradient_type": "float32"})
        for method in ("oktopk", "nccl", "ddp")
    ]
    groups = [group_runs(read_runs(each)) for each in (trained, fast)]
    for name, experiment in EXPERIMENTS.items():
        assert "open" not in [claim.verdict for claim in verdicts(experiment, *groups)], name


@pytest.mark.parametrize("bounds", [{}, {"below": 1.0, "at_most": 2.0}, {"blow": 1.0}])
def test_a_target_without_one_bound_is_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="one of below, at_most and at_least|Extra inputs"):
        Target(text="it is small", value="dense.loss", measured="{value}", **bounds)
