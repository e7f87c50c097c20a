"""The experiment on text: a small one by one command, and what its parts make of runs worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from jobs.experiment.__main__ import main
from jobs.report.write import report
from jobs.run.reader import RunReader
from tests.documents import write_documents
from tests.jobs.report.test_report import rows, write_run


@pytest.mark.long("trains a table; `make test` has one on images, and the report on text of runs made up")
@pytest.mark.timeout(600)
def test_a_small_experiment_on_text_is_one_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        *("bert", "--data", str(write_documents(tmp_path)), "-o", str(tmp_path / "out"), "--ranks", "2"),
        *("--steps", "20", "--speed-steps", "4", "--speed-batches", "2", "4", "--no-gpu-methods"),
        *("--methods", "dense", "oktopk", "--set", "model.vocabulary=0", "model.layers=1", "model.hidden=64"),
        *("optimizer.lr=3e-3", "training.device=cpu", "run.measure_every=9", "data.eval_sequences=30"),
    ]
    assert main(words) == 0, capfd.readouterr()
    runs, folder = tmp_path / "out" / "runs", tmp_path / "out" / "report"
    assert len(list(runs.glob("*.h5"))) == 4 + 6 + 5
    for name in ("dense-0", "oktopk-1", "sweep-density-0.05"):
        with RunReader(runs / f"{name}.h5") as reader:
            evaluations = reader.evaluations()
            assert evaluations["step"].tolist() == list(range(2, 21, 2))
            assert set(evaluations["samples"]) == {evaluations["samples"][0]}
            assert reader.steps()["loss"][-5:].mean() < reader.steps()["loss"][:5].mean()
    text = (folder / "results.md").read_text(encoding="utf-8")
    assert re.search(r"^\| Method +\| +Loss \(held out, at the end\) \| +Accuracy ", text, re.MULTILINE)
    assert re.search(r"^## Sweep\n\n\| density +\| +threshold_interval ", text, re.MULTILINE)
    assert re.search(r"^## A step on 2 ranks, batches of 2$", text, re.MULTILINE)
    assert re.search(r"below that of word frequencies alone +\| +failed +\| +\d\.\d+ and 2\.9\d+ +\|", text)
    assert re.search(r"1% above dense's after as many steps.*\| +(held|failed) +\|", text)
    assert re.search(r"NCCL's flat allreduce, batches of 4 +\| +open", text)
    found = {
        (row["reduction.threshold_interval"], row["reduction.density"]) for row in rows(folder / "sweep.csv")
    }
    assert found == {(i, "0.01") for i in ("32", "64", "128", "256")} | {("128", "0.001"), ("128", "0.05")}
    assert len(rows(folder / "held-out-loss-over-time.csv")) > 1
    assert "bert of 1 layers of 64" in text

    (runs / "sweep-density-0.05.h5").unlink()
    capfd.readouterr()
    assert main([*words, "--plan"]) == 0
    assert "1 of 15 runs to do" in capfd.readouterr().out


def test_runs_of_two_sizes_of_batches_are_two_tables(tmp_path: Path) -> None:
    stages = {name: np.full(50, 0.002) for name in ("select", "gather and apply")}
    fast = [
        write_run(tmp_path / f"{batch}-{method}.h5", method=method, batch=batch, cuda_graph=method != "ddp")
        for batch in (8, 256)
        for method in ("nccl", "oktopk", "ddp")
    ]
    fast.append(write_run(tmp_path / "staged.h5", batch=8, time_stages=True, stages=stages))
    report([], tmp_path / "out", throughput=fast, target=0.9)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    for part in ("A step on 4 ranks, batches of 256", "The reduction by stage on 4 ranks, batches of 8"):
        assert f"<h2>{part}</h2>" in page
    assert "Ok-Topk (timed by stage)" in page
    assert page.count("float32, CUDA graphs") == 2  # of four tasks: at both sizes, but for DDP
    assert "Held-out accuracy" not in page  # a target alone makes no picture
