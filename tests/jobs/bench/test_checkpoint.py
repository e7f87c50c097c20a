"""The bench of checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from jobs.bench.checkpoint import main

CONFIG = str(Path(__file__).parents[3] / "jobs" / "configs" / "digits.toml")


@pytest.mark.timeout(300)
def test_the_cost_of_checkpoints_is_reported_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "8", "--every", "4", "--folder", str(tmp_path)]
    tiny = ["--set", "model.width=0.0625", "training.batch_size=4"]
    assert main([CONFIG, *words, *tiny], comm=MPI.COMM_SELF) == 0
    said = capsys.readouterr().out
    assert re.search(r"cost +[+-]\d+\.\d+% of 8 steps", said)
    assert re.search(r"a set +\d+\.\d+ MB", said)
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([CONFIG, "--steps", "10", "--every", "20"], comm=MPI.COMM_SELF)
    assert "--every 20 is not in [2, 10]" in capsys.readouterr().err
    assert main([CONFIG, "--set", "model.width=0.0"], comm=MPI.COMM_SELF) == 2
