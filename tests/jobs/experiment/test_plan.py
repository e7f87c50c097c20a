"""What an experiment plans: which runs, how long, and which of them are done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.config.file import ConfigError, validate
from jobs.experiment.__main__ import parse
from jobs.experiment.experiments import EXPERIMENTS, KINDS, Trial
from jobs.experiment.plan import describe, plan, planned_files, shortened
from jobs.run.file import RunFile, RunFileError, RunInfo
from tests.golden import same_as
from tests.jobs.report.test_report import write_run
from tests.jobs.run.test_file import INFO
from tests.small_experiment import VGG, small

PLANS = {
    "vgg": "--set reduction.density_warmup_steps=9 --seeds 2",
    "vgg without GPUs": "--no-gpu-methods --speed-steps 0 --epochs 80",
    "lstm": "--epochs 26 --speed-ranks 4 --kinds speed",
    "bert": "--steps 2000 --set reduction.threshold_interval=64 training.batch_size=32",
    "bert, two kinds": "--steps 2000 --kinds speed train --speed-batches 8 --methods oktopk",
    "gpt": "--steps 2000 --seeds 2",
    "gpt without GPUs": "--steps 2000 --no-gpu-methods --seeds 1 --speed-steps 0",
    "vit": "--steps 500",
    "vit, chosen": "--steps 500 --methods dense ddp-bfloat16 --speed-steps 0",
    "vit without GPUs": "--steps 500 --no-gpu-methods --seeds 1",
}
"""Name, of which the first word is the experiment's -> the command line."""


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as "section.key" -> value, without the names of files."""
    sections = json.loads(validate(document).to_json())
    found = {f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()}
    return {name: value for name, value in found.items() if name not in ("run.file", "data.path")}


def told(settings: Mapping[str, Any], usual: Mapping[str, Any], trial: Trial | None = None) -> str:
    """The settings that are not the usual ones; of a trial but for its seed and its method."""
    implied = {} if trial is None else {"reduction.method": trial.method, "training.seed": trial.seed}
    other = {name: value for name, value in settings.items() if value not in (usual[name], implied.get(name))}
    return "\n".join(f"{name} = {value}" for name, value in other.items())


def test_every_plan_and_its_settings_are_golden(tmp_path: Path) -> None:
    parts = []
    for title, words in PLANS.items():
        name = title.split()[0].strip(",")
        options = parse([name, "--data", "x.h5", "-o", str(tmp_path), *words.split()])
        planned = plan(EXPERIMENTS[name], options)
        assert len({each.trial.name for each in planned}) == len(planned)
        assert all(each.trial.name in describe(planned) for each in planned)
        assert describe(planned).endswith(f"{len(planned)} of {len(planned)} runs to do")
        assert {validate(each.document).data.path for each in planned} == {str(Path("x.h5").absolute())}
        assert all(each.file == tmp_path / "runs" / f"{each.trial.name}.h5" for each in planned)
        first = flat(planned[0].document)
        runs: dict[str, list[str]] = {}
        for each in planned:
            trial = each.trial
            who = f"{trial.name} ({trial.kind}, {trial.method}, {trial.ranks} ranks, seed {trial.seed})"
            runs.setdefault(told(flat(each.document), first, trial), []).append(who)
        lines = [f"## {title}: {words}", "", told(first, flat({"training": {"steps": 1}})), ""]
        lines += [f"{', '.join(names)}:\n{changed}\n" for changed, names in runs.items()]
        parts.append("\n".join(lines))
    same_as(Path(__file__).with_name("plans.txt"), "\n".join(parts), tmp_path)


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


def test_runs_are_chosen_by_name_and_none_is_there_yet(tmp_path: Path) -> None:
    words = [*small(tmp_path), "--speed-ranks", "1"]
    planned = plan(VGG, parse([*words, "--runs", "speed-1-oktopk", "dense-0"]))
    assert [each.trial.name for each in planned] == ["dense-0", "speed-1-oktopk"]
    assert planned_files(planned) == {kind: [] for kind in KINDS}
    with pytest.raises(ConfigError, match="--runs dense-7: not in the plan"):
        plan(VGG, parse([*words, "--runs", "dense-7", "dense-0"]))


def test_an_unfinished_run_is_not_taken_for_done(tmp_path: Path) -> None:
    first = plan(VGG, parse(small(tmp_path)))[0]
    settings = json.loads(validate(first.document).to_json())["reduction"]
    first.file.parent.mkdir(parents=True)
    write_run(first.file, status="interrupted", settings=settings)
    assert not plan(VGG, parse(small(tmp_path)))[0].done
    assert not first.document["run"]["overwrite"]
    unguarded = plan(VGG, parse(small(tmp_path / "elsewhere", "checkpoint.enabled=false")))
    assert all(each.document["run"]["overwrite"] for each in unguarded)


@pytest.mark.parametrize(
    ("changed", "words", "refused"),
    [
        ({}, [], ""),
        ({}, ["--ranks", "7"], r"ranks: 2 there, 7 here"),
        ({"model": {"name": None}}, [], r"model\.name: None there"),
        ({"data": {"path": "elsewhere/images.h5"}}, [], ""),
        ({"data": {"path": "other.h5"}}, [], r"data: 'other.h5' there, 'images.h5' here"),
    ],
)
def test_a_run_of_the_same_settings_alone_is_done(
    tmp_path: Path, changed: dict[str, Any], words: list[str], refused: str
) -> None:
    first = plan(VGG, parse(small(tmp_path)))[0]
    saved = json.loads(validate(first.document).to_json())
    for section, keys in changed.items():
        saved[section] |= keys
    first.file.parent.mkdir(parents=True)
    RunFile(first.file, RunInfo(**{**vars(INFO), "config": json.dumps(saved), "ranks": 2})).close("complete")
    options = parse([*small(tmp_path), *words])
    if not refused:
        assert plan(VGG, options)[0].done
        return
    with pytest.raises(RunFileError, match=rf"is a complete run of another experiment \(.*{refused}"):
        plan(VGG, options)


@pytest.mark.parametrize("budget", ["0", "-1", "nan"])
def test_a_budget_of_no_time_is_refused(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["vgg", "--data", "x", "-o", "y", "--budget", budget])
    assert f"--budget {float(budget)} is not above 0" in capsys.readouterr().err
