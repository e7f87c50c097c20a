"""What an experiment is to show, held against runs whose figures are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jobs.experiment.claims import sparse_claims, speech_claims
from jobs.experiment.registry import EXPERIMENTS
from jobs.report.groups import group_runs
from jobs.report.summary import read_runs
from tests.jobs.report.test_report import K, write_run

VGG = EXPERIMENTS["vgg"]


def test_claims_on_speech_are_of_word_error_rates(tmp_path: Path) -> None:
    def word_verdicts(dense: float, oktopk: float) -> list[str]:
        folder = tmp_path / f"{dense}-{oktopk}"
        folder.mkdir()
        files = [
            write_run(folder / f"{method}.h5", method=method, accuracy=accuracy)
            for method, accuracy in (("dense", dense), ("oktopk", oktopk))
        ]
        claims = speech_claims(EXPERIMENTS["lstm"], group_runs(read_runs(files)), [])
        assert len(claims) == 3 + 5
        return [claim.verdict for claim in claims[:3]]

    assert word_verdicts(0.70, 0.695) == ["held", "held", "held"]
    assert word_verdicts(0.72, 0.70) == ["held", "held", "failed"]
    assert word_verdicts(0.69, 0.685) == ["failed", "failed", "held"]


def verdicts(groups: list[Path], fast: list[Path]) -> list[str]:
    found = sparse_claims(VGG, group_runs(read_runs(groups)), group_runs(read_runs(fast)))
    return [claim.verdict for claim in found]


def test_claims_are_held_against_what_was_measured(tmp_path: Path) -> None:
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
    assert verdicts([*dense, fine], [nccl, fast]) == ["held"] * 7
    assert verdicts([*dense, bad], [nccl, lazy]) == ["held", *["failed"] * 6]
    poor = write_run(tmp_path / "poor.h5", method="dense", accuracy=0.89)
    assert verdicts([poor, fine], [])[:2] == ["failed", "held"]
    assert verdicts([fine], [fast]) == ["open", "open", "held", "held", "held", "held", "open"]
    unfinished = write_run(tmp_path / "u.h5", accuracy=0.904, xi=(1.0,), status="interrupted")
    assert verdicts([*dense, unfinished], [])[1:5] == ["open"] * 4
    (xi,) = (claim for claim in sparse_claims(VGG, group_runs(read_runs([bad])), []) if "ξ" in claim.text)
    assert (xi.verdict, xi.measured) == ("failed", "4.10 at most; 50.0% of the samples are not below P")
