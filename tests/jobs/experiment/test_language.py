"""The experiment on text: a small one by one command, and what its parts make of runs worked out by hand."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from jobs.config.config import Config
from jobs.config.file import validate
from jobs.experiment.__main__ import main
from jobs.experiment.experiments import EXPERIMENTS, Experiment
from jobs.experiment.options import parse
from jobs.experiment.plan import plan
from jobs.experiment.targets import verdicts
from jobs.report.groups import group_runs
from jobs.report.page import task
from jobs.report.summary import read_runs
from jobs.report.write import report
from jobs.run.reader import RunReader
from tests.documents import write_documents
from tests.jobs.report.test_report import rows, write_run

BERT, GPT = EXPERIMENTS["bert"], EXPERIMENTS["gpt"]
STAGES_MS = {"step": 2.0, "select": 4.0, "exchange": 0.5, "reduce": 1.0, "gather and apply": 1.5}
SWEPT = ["density-0.001", "density-0.05", *(f"threshold_interval-{interval}" for interval in (32, 64, 256))]


def planned_settings(tmp_path: Path, *more: str) -> dict[str, tuple[object, ...]]:
    options = parse(["bert", "--data", "x.h5", "-o", str(tmp_path), "--steps", "2000", *more])
    configs = {each.trial.name: validate(each.document) for each in plan(BERT, options)}
    return {
        name: (
            config.training.steps,
            config.training.batch_size,
            config.reduction.threshold_interval,
            config.reduction.density,
        )
        for name, config in configs.items()
    }


def test_text_is_planned_with_the_seeds_batches_and_settings_of_the_table(tmp_path: Path) -> None:
    planned = planned_settings(tmp_path)
    trained = [f"{method}-0" for method in BERT.methods] + ["dense-1", "oktopk-1"]
    fast = [f"speed-4x{batch}-{method}" for batch in (8, 256) for method in (*BERT.fast, "oktopk-stages")]
    assert sorted(planned) == sorted([*trained, *fast, *(f"sweep-{name}" for name in SWEPT)])
    assert {planned[name] for name in trained} == {(2000, 8, 128, 0.01)}
    assert planned["sweep-threshold_interval-32"] == (2000, 8, 32, 0.01)
    assert planned["sweep-density-0.05"] == (2000, 8, 128, 0.05)
    assert planned["speed-4x256-nccl"] == (148, 256, 128, 0.01)
    # what the runs train with is not trained with again, and the rest is
    other = planned_settings(tmp_path, "--set", "reduction.threshold_interval=64")
    assert "sweep-threshold_interval-64" not in other
    assert other["sweep-threshold_interval-128"] == (2000, 8, 128, 0.01)
    ordered = [name.split("-")[0] for name in planned_settings(tmp_path, "--kinds", "speed", "sweep")]
    assert ordered == ["speed"] * len(fast) + ["sweep"] * len(SWEPT)


def test_settings_reach_every_run_and_a_run_by_steps_keeps_its_shape(tmp_path: Path) -> None:
    words = ["bert", "--data", "x.h5", "-o", str(tmp_path), "--steps", "2000"]
    given = ["training.precision=bfloat16", "reduction.gradient_type=bfloat16", "training.batch_size=32"]
    options = parse([*words, "--set", *given])
    planned = plan(BERT, options)
    for each in planned:
        config = validate(each.document)
        assert (config.training.precision, config.reduction.gradient_type) == ("bfloat16", "bfloat16")
        assert (config.schedule.unit, config.schedule.warmup) == ("run", 0.1)
        if each.trial.kind != "speed":
            assert (config.training.batch_size, config.training.eval_every) == (32, 125)


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
    assert len(list(runs.glob("*.h5"))) == 4 + 6 + len(SWEPT)
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


def timed(path: Path, method: str, loss: float, seconds: float = 25.0) -> Path:
    """A run whose held-out loss falls from 1 at its first step to `loss` at its end."""
    elapsed = np.linspace(0, seconds, 51)[1:]
    return write_run(
        path, method=method, held_out_loss=loss, elapsed=elapsed, settings={"threshold_interval": 128}
    )


def test_losses_are_compared_after_equal_steps_and_after_equal_time(tmp_path: Path) -> None:
    def of_losses(*files: Path) -> list[str]:
        return [claim.verdict for claim in verdicts(BERT, group_runs(read_runs(files)), [])[1:4]]

    dense = timed(tmp_path / "dense.h5", "dense", 0.5)
    overlapped = timed(tmp_path / "ovlp.h5", "dense-ovlp", 0.5, seconds=10.0)
    for loss, seconds, expected in (
        (0.504, 12.5, ["held", "held", "failed"]),  # in half the time dense is at 0.755
        (0.504, 25.0, ["held", "failed", "failed"]),
        (0.506, 9.0, ["failed", "held", "held"]),  # there DenseOvlp is at 0.551
        (0.400, 40.0, ["held", "failed", "failed"]),  # at 0.4 too late: at 0.635 when dense has ended
    ):
        sparse = timed(tmp_path / f"{loss}-{seconds}.h5", "oktopk", loss, seconds)
        assert of_losses(dense, overlapped, sparse) == expected, (loss, seconds)
    assert of_losses(dense) == ["open"] * 3


def test_a_language_model_is_trained_by_each_rival_with_every_seed(tmp_path: Path) -> None:
    words = ["gpt", "--data", "x.h5", "-o", str(tmp_path), "--steps", "2000", "--seeds", "2"]

    def planned(experiment: Experiment, *more: str) -> dict[str, Config]:
        planned = plan(experiment, parse([*words, *more]))
        return {each.trial.name: validate(each.document) for each in planned}

    trained = planned(GPT, "--kinds", "train")
    updates = ("oktopk-updates", "union-updates")
    names = ("dense", "oktopk", "powersgd-4", "sparseloco-15", *updates)
    assert sorted(trained) == sorted(f"{name}-{seed}" for name in names for seed in (0, 1))
    for config in trained.values():
        assert (config.training.steps, config.training.eval_every) == (2000, 125)
        assert config.reduction.powersgd_start == 200  # a tenth
    assert trained["sparseloco-15-1"].training.seed == 1
    assert trained["sparseloco-15-1"].reduction.method == "sparseloco"
    # a way that is a method of the library needs no GPU
    denser = {"reduction.method": "oktopk", "reduction.density": 0.05}
    more = GPT.model_copy(update={"rivals": {**GPT.rivals, "oktopk-dense": denser}})
    alone = planned(more, "--kinds", "train", "--no-gpu-methods")
    both = sorted(f"{name}-{seed}" for name in ("dense", "oktopk", *updates) for seed in (0, 1))
    assert sorted(alone) == sorted([*both, "oktopk-dense-0"])
    assert alone["oktopk-dense-0"].reduction.density == 0.05
    for name in updates:
        reduction = alone[f"{name}-1"].reduction
        assert (f"{reduction.method}-updates", reduction.sends) == (name, "updates")
        assert not reduction.deferred  # which updates do not take


def test_the_loss_of_each_rival_is_held_against_denses(tmp_path: Path) -> None:
    losses = (
        ("dense", 4.0),
        ("oktopk", 5.4),
        ("oktopk-updates", 4.02),
        ("powersgd", 4.03),
        ("sparseloco", 4.05),
    )
    runs = [write_run(tmp_path / f"{name}.h5", method=name, held_out_loss=loss) for name, loss in losses]
    claims = verdicts(GPT, group_runs(read_runs(runs)), [])[:4]
    assert [claim.verdict for claim in claims] == ["failed", "held", "held", "failed"]
    assert claims[1].text.startswith("Ok-Topk of updates's held-out loss is at most 1% above dense's")
    assert claims[2].text.startswith("PowerSGD's held-out loss is at most 1% above dense's")
    assert claims[3].measured == "+1.25%: 4.0500 and 4.0000"


def test_reductions_are_compared_at_each_size_of_batches(tmp_path: Path) -> None:
    fast = []
    for batch, seconds in ((8, 0.0021), (256, 0.0026)):
        for method, taken in (("nccl", 0.005), ("oktopk", seconds), ("ddp", 0.001)):
            path = tmp_path / f"{batch}-{method}.h5"
            settings = {"gradient_type": "bfloat16"}
            seconds_taken = np.full(50, taken)
            fast.append(
                write_run(
                    path, method=method, batch=batch, seconds_reduction=seconds_taken, settings=settings
                )
            )
    # every other step is exact, and nothing of it was timed on the device
    split = {
        name: np.where(np.arange(50) % 2, 0.001 * ms, 0.009 if name == "step" else 0.0)
        for name, ms in STAGES_MS.items()
    }
    # at 256 Ok-Topk went over MPI, and a rival's stages are not Ok-Topk's
    for name, method, batch, stages in (
        ("staged", "oktopk", 8, split),
        ("mpi", "oktopk", 256, None),
        ("rival", "topka", 256, split),
    ):
        staged = write_run(
            tmp_path / f"{name}.h5",
            method=method,
            batch=batch,
            seconds_reduction=np.full(50, 0.009),
            settings={"gradient_type": "bfloat16"},
            time_stages=True,
            stages=stages,
        )
        fast.insert(0, staged)
    groups = group_runs(read_runs(fast))
    assert {group.label for group in groups if group.method == "oktopk"} == {
        "Ok-Topk (batch_size 8)",
        "Ok-Topk (batch_size 8, timed by stage)",
        "Ok-Topk (batch_size 256)",
        "Ok-Topk (batch_size 256, timed by stage)",
    }
    claims = verdicts(BERT, [], groups)[-6:]
    assert [claim.verdict for claim in claims] == ["held", "failed", "held", "failed", "open", "held"]
    for claim in claims[:2]:
        assert claim.text.endswith("NCCL's flat allreduce of bfloat16, batches of 8")
    assert claims[0].measured == "2.38 times: 2.10 and 5.00 ms"
    assert claims[1].measured == "1.67 times: 3.00 and 5.00 ms"  # without what lies before the exchange
    assert claims[5].measured == "0.73 of NCCL's time, 1.32 of DDP's on 4 GPUs"
    replayed = [
        write_run(tmp_path / f"graph-{method}.h5", method=method, batch=8, cuda_graph=method != "ddp")
        for method in ("oktopk", "nccl", "ddp")
    ]
    groups = group_runs(read_runs(replayed))
    assert [task(group.runs[0]).endswith(", CUDA graphs") for group in groups] == [True, True, False]
    report([], tmp_path / "out", throughput=fast, target=0.9)
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "A step on 4 ranks, batches of 256" in page
    assert "A step on 4 ranks, batches of 8" in page
    assert "Ok-Topk (timed by stage)" in page
    assert "The reduction by stage on 4 ranks, batches of 8" in page
    assert "Held-out accuracy" not in page  # a target alone makes no picture


def test_the_figures_of_a_sweep_have_the_usual_settings_in_their_place(tmp_path: Path) -> None:
    usual = [write_run(tmp_path / f"o{seed}.h5", seed=seed, settings={"density": 0.01}) for seed in (0, 1)]
    dense = write_run(tmp_path / "dense.h5", method="dense", held_out_loss=0.4)
    others = [
        write_run(tmp_path / f"{density}.h5", settings={"density": density}, held_out_loss=loss)
        for density, loss in ((0.05, 0.3), (0.001, 0.6))
    ]
    report([*usual, dense], tmp_path / "out", sweep=others)
    with open(tmp_path / "out" / "sweep.csv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["reduction.density"] for row in found] == ["0.001", "0.01", "0.05"]
    assert [float(row["held_out_loss"]) for row in found] == [0.6, 0.5, 0.3]
