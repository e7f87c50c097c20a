"""What an experiment plans: which runs, how long, and which of them are done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from data.prepared_file import data_checksum
from jobs.config.file import ConfigError, validate
from jobs.experiment.experiments import EXPERIMENTS
from jobs.experiment.options import parse
from jobs.experiment.plan import describe, plan, planned_files, shortened
from jobs.experiment.trials import KINDS, Trial, trials
from jobs.run.file import RunFile, RunFileError, RunInfo
from tests.jobs.report.test_report import write_run
from tests.jobs.run.test_file import INFO
from tests.small_experiment import VGG, small


def planned_trials(**replaced: object) -> list[Trial]:
    given = {
        "ranks": 4,
        "seeds": 3,
        "methods": VGG.methods,
        "speed_ranks": (1, 2, 4),
        "speed_steps": 200,
        "speed_batches": (),
        "no_gpu_methods": False,
        **replaced,
    }
    return trials(VGG, argparse.Namespace(**given))


def test_the_table_is_the_one_that_was_promised() -> None:
    planned = planned_trials()
    trained = [trial for trial in planned if trial.kind == "train"]
    assert [trial.method for trial in trained if trial.seed == 0] == list(VGG.methods)
    assert {(trial.method, trial.seed) for trial in trained if trial.seed} == {
        (method, seed) for method in ("dense", "oktopk") for seed in (1, 2)
    }
    speeds = {(trial.method, trial.ranks) for trial in planned if trial.kind == "speed"}
    assert speeds == {(method, ranks) for method in VGG.fast for ranks in (1, 2, 4)}
    assert {"nccl", "ddp", "dense-ovlp"} <= set(VGG.fast)
    for no_gpu_methods, carried in ((False, "nccl"), (True, "dense")):
        planned_here = planned_trials(no_gpu_methods=no_gpu_methods)
        ovlp = [trial for trial in planned_here if trial.method == "dense-ovlp"]
        assert len(ovlp) == 4
        for trial in ovlp:
            assert (trial.settings["reduction.method"], trial.settings["reduction.overlap"]) == (
                carried,
                True,
            )
    assert len({trial.name for trial in planned}) == len(planned)
    assert not [trial for trial in planned_trials(no_gpu_methods=True) if trial.method in ("nccl", "ddp")]
    assert all(trial.kind == "train" for trial in planned_trials(speed_steps=0))


def test_a_shortened_run_keeps_the_shape_of_its_schedule() -> None:
    document = {
        "schedule": {"name": "step", "unit": "epochs", "warmup": 10, "milestones": [80, 120]},
        "reduction": {"dense_warmup_steps": 512},
        "training": {"epochs": 160},
    }
    short = shortened(document, "epochs", 20)
    assert short["schedule"]["warmup"] == 1.25
    assert short["schedule"]["milestones"] == [10.0, 15.0]
    assert validate(short).training.epochs == 20
    assert document["training"] == {"epochs": 160}
    assert short["reduction"] == {"dense_warmup_steps": 64}
    in_steps = {**document, "schedule": {"warmup": 10, "unit": "steps"}}
    assert shortened(in_steps, "epochs", 20)["schedule"] == {"warmup": 1.25, "unit": "steps"}
    assert shortened(in_steps, "epochs", 20, {"schedule.warmup"})["schedule"] == in_steps["schedule"]
    with pytest.raises(ConfigError, match="--steps 20: this experiment counts in epochs: give --epochs"):
        shortened(document, "steps", 20)


def test_the_plan_lists_what_is_to_do(tmp_path: Path) -> None:
    planned = plan(VGG, parse([*small(tmp_path), "--speed-ranks", "1"]))
    table = describe(planned)
    assert table.endswith("8 of 8 runs to do")
    assert all(each.trial.name in table for each in planned)
    assert planned_files(planned) == {kind: [] for kind in KINDS}


def test_runs_are_chosen_by_name(tmp_path: Path) -> None:
    words = [*small(tmp_path), "--speed-ranks", "1"]
    chosen = [each.trial.name for each in plan(VGG, parse([*words, "--runs", "speed-1-oktopk", "dense-0"]))]
    assert chosen == ["dense-0", "speed-1-oktopk"]
    with pytest.raises(ConfigError, match="--runs dense-7: not in the plan"):
        plan(VGG, parse([*words, "--runs", "dense-7", "dense-0"]))


def test_every_planned_configuration_is_valid(tmp_path: Path) -> None:
    for planned in plan(VGG, parse(["vgg", "--data", "x.h5", "-o", str(tmp_path), "--no-gpu-methods", "--methods",
                                    "dense", "oktopk", "topka", "topkdsa", "gtopk", "gaussiank",
                                    "--set", "reduction.density_warmup_steps=9"])):  # fmt: skip
        config = validate(planned.document)
        assert config.reduction.method == planned.trial.method
        assert config.reduction.density == 0.02
        assert config.run.file == str(tmp_path / "runs" / f"{planned.trial.name}.h5")
        if planned.trial.kind == "train":
            assert (config.training.epochs, config.run.measure_every) == (161, 50)
            warm_up = 512, 9
        else:
            assert config.training.steps == 200
            warm_up = 0, 0
        assert (config.reduction.dense_warmup_steps, config.reduction.density_warmup_steps) == warm_up


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_plans_configurations_of_the_data_asked_for(name: str, tmp_path: Path) -> None:
    words = [name, "--data", "x.h5", "-o", str(tmp_path), *(["--set", "data.name=cifar10"] * (name == "vit"))]
    for each in plan(EXPERIMENTS[name], parse(words)):
        assert validate(each.document).data.path == str(Path("x.h5").absolute())


def test_vit_is_compared_with_ddps_hook_and_powersgd_in_buckets_of_two_sizes(tmp_path: Path) -> None:
    asked = ["vit", "-o", str(tmp_path), "--steps", "500"]
    planned = {each.trial.name: validate(each.document) for each in plan(EXPERIMENTS["vit"], parse(asked))}
    for rank in (1, 2, 4):
        config = planned[f"powersgd-{rank}-0"].reduction
        assert (config.method, config.powersgd_rank, config.powersgd_start) == ("powersgd", rank, 50)
        for bucket in (25.0, 100.0):
            config = planned[f"speed-4-powersgd-{rank}-{bucket:g}mb"].reduction
            assert (config.powersgd_rank, config.powersgd_start, config.bucket_mb) == (rank, 2, bucket)
    for kind in ("float32", "bfloat16"):
        assert planned[f"ddp-{kind}-0"].reduction.gradient_type == kind
        assert {planned[f"speed-4-ddp-{kind}-{size}mb"].reduction.bucket_mb for size in (25, 100)} == {
            25,
            100,
        }
    assert {"speed-4-nccl", "speed-4-oktopk", "speed-4-oktopk-stages", "oktopk-1"} <= set(planned)
    assert "speed-4-ddp" not in planned
    assert all(config.data.path == "" for config in planned.values())
    chosen = plan(
        EXPERIMENTS["vit"], parse([*asked, "--methods", "dense", "powersgd-2", "--speed-steps", "0"])
    )
    assert [each.trial.name for each in chosen] == ["dense-0", "dense-1", "powersgd-2-0"]
    without = plan(EXPERIMENTS["vit"], parse([*asked, "--no-gpu-methods"]))
    assert not {each.trial.method for each in without} & {"ddp", "powersgd", "nccl"}
    on_cifar = [*asked, "--data", "x.h5", "--set", "data.name=cifar10"]
    assert validate(plan(EXPERIMENTS["vit"], parse(on_cifar))[0].document).data.name == "cifar10"


def test_an_unfinished_run_is_not_taken_for_done(tmp_path: Path) -> None:
    options = parse(small(tmp_path))
    first = plan(VGG, options)[0]
    settings = json.loads(validate(first.document).to_json())["reduction"]
    first.file.parent.mkdir(parents=True)
    write_run(first.file, status="interrupted", settings=settings)
    assert not plan(VGG, options)[0].done
    assert not first.document["run"]["overwrite"]
    unguarded = plan(VGG, parse(small(tmp_path / "elsewhere", "checkpoint.enabled=false")))
    assert all(each.document["run"]["overwrite"] for each in unguarded)
    first.file.unlink()
    write_run(first.file, settings=settings)
    with pytest.raises(
        RunFileError, match=r"is a complete run of another experiment \(.*model\.name: None there"
    ):
        plan(VGG, options)


def test_a_run_of_the_same_settings_alone_is_taken_for_done(tmp_path: Path) -> None:
    options = parse(small(tmp_path))
    first = plan(VGG, options)[0]
    saved = json.loads(validate(first.document).to_json())
    first.file.parent.mkdir(parents=True)
    RunFile(first.file, RunInfo(**{**vars(INFO), "config": json.dumps(saved), "ranks": 2})).close("complete")
    assert plan(VGG, options)[0].done
    with pytest.raises(RunFileError, match=r"\(ranks: 2 there, 7 here\)"):
        plan(VGG, parse([*small(tmp_path), "--ranks", "7"]))
    saved["training"]["epochs"] = 99
    first.file.unlink()
    RunFile(first.file, RunInfo(**{**vars(INFO), "config": json.dumps(saved), "ranks": 2})).close("complete")
    with pytest.raises(RunFileError, match=r"training\.epochs: \d+ there, \d+ here"):
        plan(VGG, options)


def test_a_run_of_other_data_of_the_same_name_is_not_taken_for_done(tmp_path: Path) -> None:
    options = parse(small(tmp_path))
    first = plan(VGG, options)[0]
    first.file.parent.mkdir(parents=True)
    saved = validate(first.document).to_json()
    RunFile(first.file, RunInfo(**{**vars(INFO), "config": saved, "ranks": 2, "data": "0-1"})).close(
        "complete"
    )
    here = data_checksum(tmp_path / "images.h5")
    with pytest.raises(RunFileError, match=rf"another experiment \(data: checksum 0-1 there, {here} here\)"):
        plan(VGG, options)
    # a report is written where the data no longer are
    (tmp_path / "images.h5").unlink()
    assert plan(VGG, options)[0].done


@pytest.mark.parametrize("budget", ["0", "-1", "nan"])
def test_a_budget_of_no_time_is_refused(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["vgg", "--data", "x", "-o", "y", "--budget", budget])
    assert f"--budget {float(budget)} is not above 0" in capsys.readouterr().err
