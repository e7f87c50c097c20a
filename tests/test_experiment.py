"""The experiment as it is started, in small: planned, cut short, continued, reported."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from data.checksums import data_checksum
from data.image_file import ImageFileWriter
from jobs.budget import RUN_SECONDS, START_SECONDS, Pace
from jobs.claims import region_claim
from jobs.config import Config
from jobs.configfile import ConfigError, apply_overrides, validate
from jobs.experiment import LEFT, main
from jobs.experiment_options import parse
from jobs.experiment_plan import describe, measured_pace, plan, planned_files, shortened
from jobs.experiment_report import write_report
from jobs.experiment_worker import main as work
from jobs.experiments import EXPERIMENTS, KINDS, Trial, trials
from jobs.groups import group_runs
from jobs.runfile import RunFile, RunFileError, RunInfo
from jobs.runreader import RunReader
from jobs.summary import read_runs
from jobs.workloads import Workload, build_workload
from tests.test_report import rows, write_run
from tests.test_runfile import INFO

ROOT = Path(__file__).parent.parent
PATIENCE = 300
VGG = EXPERIMENTS["vgg"]


def write_images(path: Path) -> Path:
    """Two classes that a network tells apart at once: dark images and bright ones."""
    rng = np.random.default_rng(0)
    counts = {"train": 64, "test": 32}
    with ImageFileWriter(
        path, name="shades", classes=("dark", "bright"), source="a test", shape=(3, 32, 32), counts=counts
    ) as file:
        for split, count in counts.items():
            labels = np.arange(count) % 2
            noise = rng.integers(0, 100, (count, 3, 32, 32))
            file.put(split, 0, (noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels)
    return path


def small(tmp_path: Path, *more: str) -> list[str]:
    images = tmp_path / "images.h5"
    tmp_path.mkdir(exist_ok=True)
    if not images.exists():
        write_images(images)
    return [
        *("vgg", "--data", str(images), "-o", str(tmp_path / "out"), "--ranks", "2", "--epochs", "2"),
        *("--seeds", "2", "--methods", "dense", "oktopk", "topka", "--speed-steps", "3", "--no-gpu-methods"),
        *(
            "--set",
            "model.width=0.0625",
            "data.name=prepared",
            "training.batch_size=8",
            "training.device=cpu",
        ),
        *("reduction.dense_warmup_steps=1", "run.measure_every=3", *more),
    ]


@pytest.mark.timeout(PATIENCE)
def test_an_experiment_grows_over_several_calls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*small(tmp_path), "--budget", "1"]) == LEFT
    said = capfd.readouterr().out
    assert "11 of 11 runs to do" in said
    assert "the budget of 1 s is for 0 of them" in said
    assert "nothing to report yet" in said
    assert not list(out.rglob("*.h5"))

    assert main(small(tmp_path)) == 0
    first = capfd.readouterr()
    names = ["dense-0", "oktopk-0", "topka-0", "dense-1", "oktopk-1"]
    fast = [f"speed-{ranks}-{method}" for ranks in (2, 1) for method in ("dense", "oktopk", "topka")]
    # one launch for each number of ranks
    assert re.findall(r"\[\d+/\d+\] (\S+)", first.err) == [*names, *fast]
    assert re.findall(r"\[(\d+)/(\d+)\]", first.err)[-1] == ("3", "3")
    for name in names:
        with RunReader(out / "runs" / f"{name}.h5") as reader:
            assert (reader.status, reader.info.ranks) == ("complete", 2)
            assert reader.info.method == name[:-2]
            assert reader.info.seed == int(name[-1])
            assert reader.info.data == data_checksum(tmp_path / "images.h5") != ""
            # 64 images, 2 ranks of 8: four steps an epoch; the first is dense
            assert len(reader.steps()["step"]) == 8
            measured = [] if name.startswith("dense") else [3, 6]
            assert reader.measures()["step"].tolist() == measured
    assert not list((out / "runs").glob("*.checkpoints"))
    text = (out / "report" / "results.md").read_text()
    assert "- Command: `python -m jobs.experiment vgg --data" in text
    assert re.search(r"^\| Dense \(2 seeds\) ", text, re.MULTILINE)
    assert re.search(r"^\| Method +\| +1 rank .* 2 ranks ", text, re.MULTILINE)
    assert re.search(r"NCCL's flat allreduce.*\| +open \| +not measured \|", text)
    assert {"index.html", "methods.csv", "throughput.csv"} <= {
        path.name for path in (out / "report").iterdir()
    }

    times = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.h5")}
    (out / "runs" / "topka-0.h5").unlink()
    assert main([*small(tmp_path), "--budget", "1", "--note", "Of noise."]) == LEFT
    for name in ("results.md", "index.html"):
        partly = (out / "report" / name).read_text()
        assert "Of noise." in partly and "not complete: topka-0" in partly
    capfd.readouterr()
    assert main(small(tmp_path)) == 0
    assert "not complete" not in (out / "report" / "results.md").read_text()
    again = capfd.readouterr()
    assert "1 of 11 runs to do" in again.out
    assert re.findall(r"\[\d+/\d+\] (\S+)", again.err) == ["topka-0"]
    changed = {path.stem for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed == {"topka-0"}

    assert main([*small(tmp_path), "--set", "optimizer.lr=0.05"]) == 2
    assert "is a complete run of another experiment (optimizer.lr 0.1, not 0.05)" in capfd.readouterr().err


@pytest.mark.timeout(PATIENCE)
def test_two_jobs_fill_one_table_at_the_same_time(tmp_path: Path) -> None:
    words = [*small(tmp_path), "--speed-steps", "0", "--seeds", "1"]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "jobs.experiment", *words, *share],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for share in (["--methods", "dense"], ["--runs", "oktopk-0"])
    ]
    try:
        for job in jobs:
            said, _ = job.communicate(timeout=PATIENCE - 30)
            assert job.returncode == 0, said
    finally:
        for job in jobs:
            job.terminate()
            job.wait()
    assert {each.trial.name for each in plan(VGG, parse(words)) if each.done} == {"dense-0", "oktopk-0"}
    assert sorted(path.name for path in (tmp_path / "out" / "runs").iterdir()) == [
        "dense-0.h5",
        "oktopk-0.h5",
    ]


@pytest.mark.timeout(PATIENCE)
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*small(tmp_path), "--speed-steps", "0", "--seeds", "1", "--methods", "dense", "oktopk"]
    path = tmp_path / "out" / "runs" / "dense-0.h5"
    path.parent.mkdir(parents=True)
    path.write_text("no run file, and precious")
    assert main(words) == 1
    said = capfd.readouterr()
    assert re.search(r"jobs\.experiment: dense-0 failed: run file .*dense-0\.h5 exists", said.err)
    assert "1 of 2 runs are complete" in said.out
    assert "dense-0 failed" in (tmp_path / "out" / "report" / "results.md").read_text()
    assert path.read_text() == "no run file, and precious"
    with RunReader(path.with_name("oktopk-0.h5")) as reader:
        assert reader.status == "complete"


@pytest.mark.timeout(PATIENCE)
def test_a_stopped_experiment_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    words = [*small(tmp_path), "--speed-steps", "0", "--seeds", "1", "--methods", "oktopk", "--epochs", "100"]
    steady = ["run.flush_every=1", "training.eval_every=200"]
    path = tmp_path / "out" / "runs" / "oktopk-0.h5"
    command = [sys.executable, "-m", "jobs.experiment", *words, "--set", *steady]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        for _ in range(600):
            if path.exists():
                with RunReader(path) as reader:
                    if len(reader.steps()["step"]) > 20:
                        break
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM
    with RunReader(path) as reader:
        assert reader.status == "interrupted"
        done = len(reader.steps()["step"])
    assert done > 20
    assert main([*words, "--set", *steady]) == 0
    with RunReader(path) as reader:
        assert reader.status == "complete"
        assert reader.segments()["step"].tolist() == [0, done]
        assert reader.steps()["step"].tolist() == list(range(1, 401))


def test_nothing_of_a_run_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse([*small(tmp_path), "--ranks", "1", "--epochs", "1", "--seeds", "1", "--speed-steps", "0"])
    first = plan(VGG, options)[0]
    entries: list[dict[str, Any]] = []
    networks: list[weakref.ref[Any]] = []
    for name, *changed in (("oktopk",), ("dense-ovlp",), ("diverging", "optimizer.lr=1e30"), ("ddp",)):
        method = "ddp" if changed else name
        changed += [f"reduction.method={method}", f"run.file={tmp_path / name}.h5", "run.measure_every=0"]
        trial = {**dataclasses.asdict(first.trial), "name": name, "method": method}
        entries.append({"trial": trial, "document": apply_overrides(first.document, changed), "name": name})

    def build(config: Config, **others: Any) -> Workload:
        assert not [network for network in networks if network() is not None]
        workload = build_workload(config, **others)
        networks.append(weakref.ref(workload.model))
        return workload

    monkeypatch.setattr("jobs.experiment_worker.build_workload", build)
    paths = [tmp_path / "plan.json", tmp_path / "outcome.json"]
    paths[0].write_text(
        json.dumps({"deadline": None, "guesses": {"train": 1.0}, "measured": [], "trials": entries})
    )
    assert work(list(map(str, paths)), comm=MPI.COMM_SELF) == 1
    failed = json.loads(paths[1].read_text())["failed"]
    assert list(failed) == ["diverging"], failed
    assert [network() for network in networks] == [None] * 4


def planned_trials(**replaced: object) -> list[Trial]:
    given = {
        "ranks": 4,
        "seeds": 3,
        "methods": VGG.methods,
        "speed_ranks": (1, 2, 4),
        "speed_steps": 200,
        "region_steps": 300,
        "elsewhere": True,
        **replaced,
    }
    return trials(VGG, **given)  # type: ignore[arg-type]


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
    assert len({trial.name for trial in planned}) == len(planned)
    assert not [trial for trial in planned_trials(elsewhere=False) if trial.method in ("nccl", "ddp")]
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


def trial(method: str, ranks: int = 4, kind: str = "train") -> Trial:
    return Trial(f"{kind}-{method}-{ranks}", kind, method, ranks, 0, {})


def test_expectations_come_from_the_nearest_run_that_is_done() -> None:
    pace = Pace({"train": 100.0, "speed": 5.0})
    assert pace.seconds(trial("dense")) == 100.0
    assert not pace.known(trial("dense"))
    pace.add(trial("dense"), 60.0)
    pace.add(trial("dense"), 64.0)
    pace.add(trial("topka", ranks=2), 90.0)
    assert pace.known(trial("oktopk"))
    assert pace.seconds(trial("dense")) == 62.0
    assert pace.seconds(trial("oktopk")) == 64.0  # the slowest of its ranks
    assert pace.seconds(trial("oktopk", ranks=1)) == 90.0
    assert pace.seconds(trial("dense", kind="speed")) == 5.0


def test_the_plan_says_what_fits(tmp_path: Path) -> None:
    options = parse([*small(tmp_path), "--speed-ranks", "1", "--epoch-seconds", "10"])
    planned = plan(VGG, options)
    pace = measured_pace(VGG, options, planned)
    assert pace.guesses == dict.fromkeys(("train", "speed"), RUN_SECONDS + 20)
    run = RUN_SECONDS + 20
    table = describe(planned, pace, START_SECONDS + 2.5 * run)
    assert table.endswith(
        f"8 of 8 runs to do, about {2 * START_SECONDS + 8 * run:.0f} s; the budget of "
        f"{START_SECONDS + 2.5 * run:.0f} s is for 2 of them, about {START_SECONDS + 2 * run:.0f} s"
    )
    assert "a guess" in table
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


def test_speech_is_planned_with_the_methods_and_seeds_of_the_table(tmp_path: Path) -> None:
    planned = plan(EXPERIMENTS["lstm"], parse(["lstm", "--data", "x.h5", "-o", str(tmp_path)]))
    trained = [each.trial.name for each in planned if each.trial.kind == "train"]
    assert sorted(trained) == sorted(
        [f"{method}-0" for method in EXPERIMENTS["lstm"].methods]
        + [f"{method}-{seed}" for method in ("dense", "oktopk") for seed in (1, 2)]
    )
    for each in planned:
        config = validate(each.document)
        assert (config.model.name, config.data.name, config.data.path) == (
            "lstm",
            "an4",
            str(Path("x.h5").absolute()),
        )
        assert config.optimizer.clip_norm == 400.0


def test_regions_are_compared_by_two_short_runs_of_speech(tmp_path: Path) -> None:
    asked = ["lstm", "--data", "x.h5", "-o", str(tmp_path), "--region-steps", "250"]
    asked += ["--set", "reduction.density_warmup_steps=9"]
    planned = [each for each in plan(EXPERIMENTS["lstm"], parse(asked)) if each.trial.kind == "regions"]
    assert [each.trial.name for each in planned] == ["regions-balanced", "regions-equal"]
    for each, balanced in zip(planned, (True, False), strict=True):
        config = validate(each.document)
        assert (config.reduction.balanced_regions, config.training.steps) == (balanced, 250)
        assert (config.reduction.dense_warmup_steps, config.reduction.density_warmup_steps) == (128, 0)
        assert 0 < config.run.measure_every < config.reduction.threshold_interval
    for fewer in (["--region-steps", "0"], ["--ranks", "1"], ["--methods", "dense"]):
        kinds = {each.trial.kind for each in plan(EXPERIMENTS["lstm"], parse([*asked, *fewer]))}
        assert kinds == {"train", "speed"}
    assert all(trial.kind != "regions" for trial in planned_trials())


def test_the_balance_of_regions_stands_in_every_form_of_the_report(tmp_path: Path) -> None:
    def regions(name: str, balanced: bool, balance: float, status: str = "complete") -> Path:
        settings = {"balanced_regions": balanced}
        path = tmp_path / f"{name}.h5"
        return write_run(path, settings=settings, xi=(1.0, 2.0), balance=balance, status=status)

    files = [regions("balanced", True, 1.08), regions("equal", False, 2.5)]
    experiment = EXPERIMENTS["lstm"]
    said = write_report(
        experiment, {**{key: [] for key in KINDS}, "regions": files}, tmp_path / "out", "it", ["A note."]
    )
    text = (tmp_path / "out" / "results.md").read_text()
    for row in (r"balanced by nnz +\| +1\.08 \(at most 1\.08\) +\| +1\.10", r"of equal length +\| +2\.50"):
        assert re.search(row, text) and re.search(row, said)
    assert "\n\nA note.\n\n" in text
    assert re.search(r"Balanced regions leave .*\| +held \| +1\.08 of the mean, with equal ones 2\.50", text)
    assert "of equal length" in (tmp_path / "out" / "index.html").read_text()
    found = [float(row["region_balance"]) for row in rows(tmp_path / "out" / "methods.csv")]
    assert found == [1.08, 2.5]

    def verdict(*paths: Path) -> str:
        return region_claim(group_runs(read_runs(paths))).verdict

    assert verdict(files[0], regions("even", False, 1.05)) == "failed"
    assert verdict(files[0]) == verdict(files[0], regions("cut", False, 2.5, "interrupted")) == "open"


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
        RunFileError, match=r"is a complete run of another experiment \(model\.name None, not"
    ):
        plan(VGG, options)


def test_a_run_of_an_earlier_version_is_taken_for_done(tmp_path: Path) -> None:
    options = parse(small(tmp_path))
    first = plan(VGG, options)[0]
    saved = json.loads(validate(first.document).to_json())
    for key in ("deferred", "rotate"):
        del saved["reduction"][key]
    first.file.parent.mkdir(parents=True)
    RunFile(first.file, RunInfo(**{**vars(INFO), "config": json.dumps(saved), "ranks": 2})).close("complete")
    assert plan(VGG, options)[0].done
    with pytest.raises(RunFileError, match=r"\(ranks 2, not 7\)"):
        plan(VGG, parse([*small(tmp_path), "--ranks", "7"]))
    del saved["training"]["epochs"]
    first.file.unlink()
    RunFile(first.file, RunInfo(**{**vars(INFO), "config": json.dumps(saved), "ranks": 2})).close("complete")
    with pytest.raises(RunFileError, match=r"training\.epochs \d+, not \d+"):
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


def test_an_output_that_is_no_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert main([*small(tmp_path), "--runs", "dense-0"]) == 2
    assert re.search(r"jobs\.experiment: .*(Not a directory|File exists)", capsys.readouterr().err)
