"""The batch scripts on a real Slurm: to the end, preempted and queued again, and told apart from N jobs of one rank."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.prepare import prepare_an4
from jobs.restart.files import rank_file, read_part
from jobs.run.reader import RunReader
from models.vgg import VGG16
from tests.cluster.slurm.conftest import PATIENCE, ROOT, Slurm
from tests.documents import write_documents
from tests.tiny_runs import CONFIG, SETTINGS, Job, assert_same_outcome, rank_processes, steps_done
from tests.utterances import write_an4

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3 * PATIENCE)]

TOY = ["model.width=0.0625", "training.batch_size=4", "training.eval_every=20"]


def finished(path: Path) -> int:
    with RunReader(path) as reader:
        assert reader.status == "complete"
    return steps_done(path)


def tiny_script(folder: Path, path: Path, *faults: str) -> str:
    """A batch script over jobs/cluster/batch.sh that trains the network of tests.tiny_job."""
    script = folder / f"{path.stem}.sbatch"
    # as on one host, whatever nodes Slurm gives
    settings = (*SETTINGS, "reduction.wire=plain", "reduction.levels=flat")
    words = " ".join(
        [str(CONFIG), "--set", *settings, f"run.file={path}", "run.flush_every=1", "--", *faults]
    )
    script.write_text(
        "#!/bin/bash\n#SBATCH --ntasks=4 --requeue --open-mode=append --signal=B:USR1@120\n"
        f"source jobs/cluster/batch.sh\nrun_training -m tests.tiny_job {words}\n"
    )
    return str(script)


def wait_for_step(slurm: Slurm, job: str, path: Path, step: int) -> None:
    end = time.monotonic() + PATIENCE
    while steps_done(path) < step:
        assert slurm.fact(job, "JobState") in ("PENDING", "CONFIGURING", "RUNNING"), slurm.output(job)
        assert time.monotonic() < end, slurm.output(job)
        time.sleep(0.1)


def test_each_workload_ends_with_its_result(slurm: Slurm) -> None:
    runs = {name: slurm.folder / f"{name}.h5" for name in ("vgg", "lstm", "bert")}
    bench = slurm.folder / "bench.json"
    spoken = [" ".join(("NO", "GO", "UP")[: 1 + number % 3]) for number in range(16)]
    write_an4(slurm.folder / "an4", spoken[:12], spoken[12:])
    prepare_an4(slurm.folder, slurm.folder / "an4.h5", partial=True)
    toys = {
        # the paper's settings, on data that is always there
        "vgg": [*TOY, "data.name=digits", "data.flip=false"],
        "lstm": [f"data.path={slurm.folder / 'an4.h5'}", "model.width=0.0625", "training.eval_every=10"],
        "bert": [
            f"data.path={write_documents(slurm.folder)}",
            *("model.vocabulary=0", "model.layers=1", "model.hidden=64", "training.eval_every=10"),
        ],
    }
    jobs = {
        name: slurm.submit(
            "--ntasks=2",
            "jobs/cluster/train.sbatch",
            f"jobs/configs/{name}.toml",
            *toy,
            "training.steps=10",
            f"run.file={runs[name]}",
        )
        for name, toy in toys.items()
    }
    words = ["--length", "20000", "--steps", "40", "--json", str(bench)]
    jobs["bench"] = slurm.submit("--ntasks=2", "jobs/cluster/bench.sbatch", *words)
    for job in jobs.values():
        slurm.complete(job)
    for name, path in runs.items():
        assert finished(path) == 10
        with RunReader(path) as reader:
            assert reader.info.ranks == 2
            assert reader.config["model"]["name"] == {"vgg": "vgg16"}.get(name, name)
            assert np.isfinite(reader.evaluations()["loss"]).all()
    assert json.loads(bench.read_text())["runs"][0]["ranks"] == 2


def test_the_commands_of_the_documentation_train_a_model(slurm: Slurm) -> None:
    block = re.search(r"(?m)(?:^    .+\n){5}", (ROOT / "docs" / "cluster.md").read_text())
    assert block is not None
    clone, install, edit, submit, watch = (line.strip() for line in block[0].splitlines())
    assert clone.startswith("git clone ")
    assert ".venv" in install
    checkout = slurm.folder / "oktopk"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "demo"))
    (checkout / ".venv").symlink_to(sys.prefix)
    # the site that this one-machine Slurm is needs nothing
    assert (checkout / edit.split()[-1]).is_file()
    said = slurm.shell(f"{submit} {' '.join(TOY)} training.steps=30", checkout)
    job = said.split()[-1]
    shown = slurm.shell(watch, checkout, terminal=True)
    assert "not there yet" in shown
    assert "complete" in shown
    slurm.wait_for(job, "COMPLETED")
    printed = (checkout / "runs" / f"train-{job}.out").read_text()
    assert re.search(r"launcher: \S+ \(4 ranks on n\[1-2\]\)", printed)
    assert finished(checkout / "runs" / "digits.h5") == 30
    # and it can be read as the documentation says
    newest = checkout / "runs" / "digits.checkpoints" / "step-00000030"
    trained = read_part(newest / "common.safetensors")["model"] | read_part(newest / rank_file(0))["buffers"]
    VGG16(classes=10, width=0.0625).load_state_dict(trained)


def test_an_array_trains_with_each_method(slurm: Slurm) -> None:
    methods = ["dense", "oktopk", "gtopk"]
    job = slurm.submit(
        "--array=0-3",
        "--ntasks=2",
        "jobs/cluster/sweep.sbatch",
        str(CONFIG),
        "reduction.method",
        ",".join(methods),
        *TOY,
        "training.steps=6",
    )
    for index, method in enumerate(methods):
        slurm.complete(f"{job}_{index}")
        assert finished(slurm.folder / f"digits-{method}.h5") == 6
    slurm.wait_for(f"{job}_3", "FAILED")
    assert "index 3 of the array has no value: there are 3, so --array=0-2" in slurm.output(f"{job}_3")


def test_ranks_that_do_not_see_each_other_stop_at_once(slurm: Slurm) -> None:
    path = slurm.folder / "run.h5"
    script = slurm.folder / "wrong.sbatch"
    for module, words in (("train", f"{CONFIG} --set run.file={path}"), ("bench", "--length 1000")):
        script.write_text(
            f"#!/bin/bash\nsrun --mpi=none -n 4 {sys.executable} -m mpi4py -m jobs.{module} {words}\n"
        )
        job = slurm.submit("--ntasks=4", str(script))
        slurm.wait_for(job, "FAILED")
        assert "Slurm started 4 ranks, but mpi4py's MPI sees 1" in slurm.output(job)
        assert slurm.fact(job, "ExitCode") == "2:0"
    assert not path.exists()
    # more cores were asked for than ranks are started
    script.write_text(
        "#!/bin/bash\nsource jobs/cluster/batch.sh\n"
        f"srun --mpi=pmix -n 2 {sys.executable} -m mpi4py -m jobs.train {CONFIG} --set run.file={path}\n"
    )
    job = slurm.submit("--ntasks=4", str(script))
    slurm.wait_for(job, "FAILED")
    assert "the batch script started 4 ranks, but mpi4py's MPI sees 2" in slurm.output(job)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("undisturbed") / "run.h5"
    job = Job(path, 4)
    assert job.wait() == 0, job.said
    return path


@pytest.mark.parametrize(
    ("to", "launcher"), [("batch script", "srun-pmix"), ("steps", "srun-pmix"), ("batch script", "mpiexec")]
)
def test_a_preempted_job_ends_as_an_undisturbed_one(
    slurm: Slurm, undisturbed: Path, to: str, launcher: str
) -> None:
    path = slurm.folder / "run.h5"
    job = slurm.submit(tiny_script(slurm.folder, path, "seconds=0.1"), launcher=launcher)
    wait_for_step(slurm, job, path, 5)
    if to == "batch script":
        slurm.call("scancel", "--batch", "--signal=USR2", job)
    wait_for_step(slurm, job, path, 13)
    slurm.call("scancel", *(["--batch"] if to == "batch script" else []), "--signal=USR1", job)
    said = slurm.complete(job)
    assert slurm.fact(job, "Restarts") == "1"
    assert "SIGUSR1: stopped after step" in said
    assert f"job {job} stopped with a checkpoint: queued again" in said
    assert "resumed after step" in said
    assert said.count("Current thread") == (4 if to == "batch script" else 0)
    with RunReader(path) as reader:
        first, second = reader.segments()["step"].tolist()
    assert first == 0
    assert 13 <= second < 60
    assert_same_outcome(undisturbed, path, same_hosts=False)


def test_a_cancelled_job_stays_so_though_told_to_stop_before(slurm: Slurm) -> None:
    path = slurm.folder / "run.h5"
    job = slurm.submit(tiny_script(slurm.folder, path, "seconds=1"))
    wait_for_step(slurm, job, path, 1)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.call("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    assert slurm.fact(job, "Restarts") == "0"
    assert "queued again" not in slurm.output(job)


def test_a_lost_node_is_no_success(slurm: Slurm) -> None:
    path = slurm.folder / "run.h5"
    script = tiny_script(slurm.folder, path, "seconds=0.1")
    job = slurm.submit(script, launcher="mpiexec")
    wait_for_step(slurm, job, path, 3)
    # mpiexec's own daemons on the other nodes die of it
    slurm.call("scancel", "--signal=KILL", f"{job}.0")
    slurm.wait_for(job, "FAILED")


def test_a_killed_rank_ends_the_job_in_seconds(slurm: Slurm) -> None:
    path = slurm.folder / "run.h5"
    job = slurm.submit(tiny_script(slurm.folder, path, "seconds=0.1"))
    wait_for_step(slurm, job, path, 12)
    os.kill(rank_processes(path)[0], signal.SIGKILL)
    killed = time.monotonic()
    slurm.wait_for(job, "FAILED")
    assert time.monotonic() - killed < 10
    assert "Killed" in slurm.output(job)
