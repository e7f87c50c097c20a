"""The experiment as it is started, in small: cut short, continued, reported."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.prepared_file import data_checksum
from jobs.experiment.__main__ import LEFT, main, parse
from jobs.experiment.plan import plan
from jobs.run.reader import RunReader
from tests.small_experiment import VGG, small
from tests.tiny_runs import steps_done

ROOT = Path(__file__).parents[3]
PATIENCE = 600


@pytest.mark.long("trains in several calls; `make test` has a run that fails and does not stop the others")
@pytest.mark.timeout(PATIENCE)
def test_an_experiment_grows_over_several_calls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*small(tmp_path), "--budget", "1"]) == LEFT
    said = capfd.readouterr().out
    assert "11 of 11 runs to do" in said
    assert "nothing to report yet" in said
    assert not list(out.rglob("*.h5"))

    assert main(small(tmp_path)) == 0
    first = capfd.readouterr()
    names = ["dense-0", "oktopk-0", "topka-0", "dense-1", "oktopk-1"]
    fast = [f"speed-{ranks}-{method}" for ranks in (2, 1) for method in ("dense", "oktopk", "topka")]
    assert re.findall(r"^\[\d+/11\] (\S+)$", first.err, re.MULTILINE) == [*names, *fast]
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
    assert re.search(r"NCCL's flat allreduce.*\| +open +\| +not measured +\|", text)
    assert {"index.html", "methods.csv"} <= {path.name for path in (out / "report").iterdir()}

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
    assert re.findall(r"^\[\d+/\d+\] (\S+)$", again.err, re.MULTILINE) == ["topka-0"]
    changed = {path.stem for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert changed == {"topka-0"}

    assert main([*small(tmp_path), "--set", "optimizer.lr=0.05"]) == 2
    assert (
        "is a complete run of another experiment (optimizer.lr: 0.1 there, 0.05 here)"
        in capfd.readouterr().err
    )


@pytest.mark.long("trains, stops and goes on; `make test` has a training run that does")
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
    names = [f"{run}.{suffix}" for run in ("dense-0", "oktopk-0") for suffix in ("h5", "toml")]
    assert sorted(path.name for path in (tmp_path / "out" / "runs").iterdir()) == names


@pytest.mark.timeout(PATIENCE)
def test_a_failed_run_stops_no_other_and_a_budget_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*small(tmp_path), "--ranks", "1", "--speed-steps", "0", "--seeds", "1"]
    words += ["--methods", "dense", "oktopk", "--epochs", "100000"]
    failing, path = (tmp_path / "out" / "runs" / f"{method}-0.h5" for method in ("dense", "oktopk"))
    failing.parent.mkdir(parents=True)
    failing.write_text("no run file, and precious")
    for budget in (14, 28, 56, 112):  # a busy machine takes longer until it trains
        last = ["--budget", str(budget), "--set", "run.flush_every=1", "training.eval_every=1000000"]
        status = main([*words, *last])
        if steps_done(path):
            break
    assert status == 1
    said = capfd.readouterr()
    assert re.search(r"jobs\.train: run file .*dense-0\.h5 exists", said.err)
    assert re.search(
        r"jobs\.experiment: dense-0 failed: jobs\.train .*dense-0\.toml ended with status 2", said.err
    )
    assert "0 of 2 runs are complete" in said.out
    text = (tmp_path / "out" / "report" / "results.md").read_text()
    assert "dense-0 failed" in text and "not complete: oktopk-0" in text
    assert failing.read_text() == "no run file, and precious"
    with RunReader(path) as reader:
        assert reader.status == "interrupted"
        assert reader.info.command == f"jobs.train {path.with_suffix('.toml')}"
    assert list(path.parent.glob("oktopk-0.checkpoints/step-*"))
    assert main([*words, "--runs", "oktopk-0", "--budget", "1e-9"]) == LEFT


@pytest.mark.long("two jobs that train at once; `make test` has one")
@pytest.mark.timeout(PATIENCE)
def test_a_stopped_experiment_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    words = [*small(tmp_path), "--speed-steps", "0", "--seeds", "1", "--methods", "oktopk", "--epochs", "40"]
    steady = ["run.flush_every=1", "training.eval_every=200"]
    path = tmp_path / "out" / "runs" / "oktopk-0.h5"
    command = [sys.executable, "-m", "jobs.experiment", *words, "--set", *steady]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        end = time.monotonic() + PATIENCE / 2
        while steps_done(path) <= 20:
            assert job.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE / 4) == 128 + signal.SIGTERM
    with RunReader(path) as reader:
        assert reader.status == "interrupted"
        done = len(reader.steps()["step"])
    assert done > 20
    assert main([*words, "--set", *steady]) == 0
    with RunReader(path) as reader:
        assert reader.status == "complete"
        assert reader.segments()["step"].tolist() == [0, done]
        assert reader.steps()["step"].tolist() == list(range(1, 161))


def test_an_output_that_is_no_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert main([*small(tmp_path), "--runs", "dense-0"]) == 2
    assert re.search(r"jobs\.experiment: .*(Not a directory|File exists)", capsys.readouterr().err)
