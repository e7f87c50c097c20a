"""The targets of experiments, compared with runs whose figures are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs.experiment.experiments import EXPERIMENTS, Experiment, Target
from jobs.experiment.targets import verdicts
from jobs.report.groups import group_runs
from jobs.report.summary import read_runs
from tests.jobs.experiment.test_language import STAGES_MS, timed
from tests.jobs.report.test_report import K, write_run

VGG = EXPERIMENTS["vgg"]


def test_targets_of_speech_are_of_word_error_rates(tmp_path: Path) -> None:
    def word_verdicts(dense: float, oktopk: float) -> list[str]:
        folder = tmp_path / f"{dense}-{oktopk}"
        folder.mkdir()
        files = [
            write_run(folder / f"{method}.h5", method=method, accuracy=accuracy)
            for method, accuracy in (("dense", dense), ("oktopk", oktopk))
        ]
        claims = verdicts(EXPERIMENTS["lstm"], group_runs(read_runs(files)), [])
        assert len(claims) == 3 + 5
        return [claim.verdict for claim in claims[:3]]

    assert word_verdicts(0.70, 0.695) == ["held", "held", "held"]
    assert word_verdicts(0.72, 0.70) == ["held", "held", "failed"]
    assert word_verdicts(0.69, 0.685) == ["failed", "failed", "held"]


def found(experiment: Experiment, *files: list[Path]) -> list[str]:
    """The verdicts on runs that were trained, and compared by speed."""
    return [claim.verdict for claim in verdicts(experiment, *(group_runs(read_runs(each)) for each in files))]


def test_targets_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    good = np.full(50, float(K))
    dense = [
        write_run(tmp_path / f"d{i}.h5", method="dense", seed=i, accuracy=0.9 + 0.01 * i) for i in (0, 1)
    ]
    fine = write_run(tmp_path / "fine.h5", accuracy=0.904, xi=(1.0, 3.9), global_nnz=good)
    bad = write_run(
        tmp_path / "bad.h5",
        accuracy=0.90,
        xi=(1.0, 4.1),
        global_nnz=1.1 * good,
        words=np.full(50, 91.0),
        seconds_data=np.full(50, 0.01),
    )
    quick, slow = np.full(50, 0.001), np.full(50, 0.003)
    nccl = write_run(tmp_path / "nccl.h5", method="nccl", seconds_reduction=np.full(50, 0.002))
    fast = write_run(tmp_path / "fast.h5", seconds_reduction=quick)
    lazy = write_run(tmp_path / "lazy.h5", seconds_reduction=slow)
    assert found(VGG, [*dense, fine], [nccl, fast]) == ["held"] * 7
    assert found(VGG, [*dense, bad], [nccl, lazy]) == ["held", *["failed"] * 6]
    poor = write_run(tmp_path / "poor.h5", method="dense", accuracy=0.89)
    assert found(VGG, [poor, fine], [])[:2] == ["failed", "held"]
    assert found(VGG, [fine], [fast]) == ["open", "open", "held", "held", "held", "held", "open"]
    unfinished = write_run(tmp_path / "u.h5", accuracy=0.904, xi=(1.0,), status="interrupted")
    assert found(VGG, [*dense, unfinished], [])[1:5] == ["open"] * 4
    (xi,) = (claim for claim in verdicts(VGG, group_runs(read_runs([bad])), []) if "ξ" in claim.text)
    assert (xi.verdict, xi.measured) == ("failed", "4.10 at most; 50.0% of the samples are not below P")


def test_every_target_has_a_verdict_where_all_was_measured(tmp_path: Path) -> None:
    trained = [
        timed(tmp_path / f"{method}.h5", method, 0.5)
        for method in ("dense", "oktopk", "dense-ovlp", "powersgd")
    ]
    fast = [
        write_run(tmp_path / f"fast-{method}.h5", method=method, settings={"gradient_type": "float32"})
        for method in ("oktopk", "nccl", "ddp")
    ]
    stages = {name: np.full(50, 0.001 * ms) for name, ms in STAGES_MS.items()}
    fast.append(write_run(tmp_path / "staged.h5", time_stages=True, stages=stages))
    measured = write_run(tmp_path / "measured.h5", accuracy=0.9, xi=(1.0, 2.0), held_out_loss=0.5)
    trained[1] = measured
    for name, experiment in EXPERIMENTS.items():
        open_targets = [
            claim.text
            for claim in verdicts(experiment, *(group_runs(read_runs(each)) for each in (trained, fast)))
            if claim.verdict == "open"
        ]
        # the words are not there
        assert all("word frequencies" in text for text in open_targets), (name, open_targets)


@pytest.mark.parametrize("bounds", [{}, {"below": 1.0, "at_most": 2.0}, {"blow": 1.0}])
def test_a_target_without_one_bound_is_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="one of below, at_most and at_least|Extra inputs"):
        Target(text="it is small", value="dense.loss", measured="{value}", **bounds)
