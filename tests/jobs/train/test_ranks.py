"""Training on several ranks, as it is started: by mpiexec."""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.report.summary import Run, read_runs
from jobs.run.reader import RunReader
from tests.devices import gpus
from tests.launched import PATIENCE, run_ranks

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "jobs" / "configs" / "digits.toml"


@pytest.mark.timeout(PATIENCE)
def test_a_training_run_learns_and_keeps_to_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    overrides = [
        "model.width=0.0625",
        "training.steps=120",
        "training.eval_every=60",
        "schedule.warmup=10",
        "optimizer.lr=0.05",
        "run.measure_every=25",
    ]
    done = run_ranks(2, "-m", "jobs.train", str(CONFIG), "--set", f"run.file={path}", *overrides)
    assert done.returncode == 0, done.stderr
    assert "120/120" in done.stderr
    assert "held-out" in done.stderr
    (run,) = read_runs([path])
    assert (run.status, run.count, run.info.ranks, run.info.method) == ("complete", 120, 2, "oktopk")
    assert run.steps["step"].tolist() == list(range(1, 121))
    assert run.steps["loss"][-20:].mean() < 0.3 * run.steps["loss"][:20].mean()
    assert run.evaluations["accuracy"][-1] > 0.8
    assert run.evaluations["samples"].tolist() == [898, 898]
    assert run.steps["words"].mean() <= run.upper_bound
    assert np.all(run.steps["words_busiest"] >= run.steps["words"])
    assert np.all(run.steps["k"] == run.info.k)
    assert np.all(run.steps["seconds_reduction"] > 0)
    assert {"select", "reduce", "allgather"} <= run.stages.keys()
    stages = np.sum(list(run.stages.values()), axis=0)
    assert stages + run.steps["seconds_rest"] == pytest.approx(run.steps["seconds_reduction"])
    assert run.steps["learning_rate"][9] == pytest.approx(0.05)
    with RunReader(path) as reader:
        measures, hardware = reader.measures(), json.loads(reader.info.hardware)
        assert reader.info.command.startswith(f"jobs.train {CONFIG} --set run.file={path}")
    assert measures["step"].tolist() == [25, 50, 75, 100]
    assert np.all(measures["xi"] > 0)
    # below the ranks, as the paper saw, while there is a gradient to speak of: once it vanishes residuals are large beside it
    assert np.all(measures["xi"][:2] < 2)
    assert np.all((measures["fill_in"] > 1) & (measures["fill_in"] < 2 * 1.25))
    assert np.all(measures["seconds"] > 0)
    assert hardware["cores"] == os.cpu_count()


@pytest.mark.skipif(not gpus(), reason="no GPU")
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_train_on_gpus_and_may_share_one(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "run.h5"
    overrides = [
        "training.device=auto",
        "model.width=0.0625",
        "training.steps=240",
        "training.eval_every=120",
        "schedule.warmup=10",
        "optimizer.lr=0.05",
        "data.crop=2",
    ]
    done = run_ranks(ranks, "-m", "jobs.train", str(CONFIG), "--set", f"run.file={path}", *overrides)
    assert done.returncode == 0, done.stderr
    (run,) = read_runs([path])
    assert (run.status, run.count, run.info.ranks) == ("complete", 240, ranks)
    assert '"device": "NVIDIA' in run.info.versions
    assert run.steps["loss"][-20:].mean() < 0.5 * run.steps["loss"][:20].mean()
    assert run.evaluations["samples"].tolist() == [898, 898]
    stages = np.sum(list(run.stages.values()), axis=0)
    assert stages + run.steps["seconds_rest"] == pytest.approx(run.steps["seconds_reduction"])
    assert np.all(np.diff(run.steps["elapsed"]) > -1e-3)


SEVERAL = """
    import json, sys
    from mpi4py import MPI
    from jobs.train.__main__ import main

    config, jobs = sys.argv[1:3]
    for overrides in json.loads(jobs):
        codes = MPI.COMM_WORLD.gather(main([config, "--set", *overrides]))
        if MPI.COMM_WORLD.rank == 0:
            print(codes)
"""


def train_several(
    folder: Path, common: list[str], **runs: list[str]
) -> tuple[dict[str, Run], list[str], str]:
    """Trains one after another in one job of two ranks: the runs by name, their exit codes, what was said."""
    script = folder / "several.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(SEVERAL))
    jobs = [[f"run.file={folder}/{name}.h5", *common, *overrides] for name, overrides in runs.items()]
    done = run_ranks(2, str(script), str(CONFIG), json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    read = read_runs([folder / f"{name}.h5" for name in runs])
    return dict(zip(runs, read, strict=True)), done.stdout.split("\n")[:-1], done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.timeout(PATIENCE)
def test_methods_and_modes_train_alike_on_gpus(tmp_path: Path) -> None:
    half = "reduction.gradient_type=bfloat16"
    runs, codes, _ = train_several(
        tmp_path,
        [
            "training.device=cuda",
            "training.precision=bfloat16",
            "training.channels_last=true",
            "training.accumulate=2",
            "training.steps=20",
            "training.eval_every=10",
            "optimizer.clip_norm=1.0",
            "optimizer.lr=0.01",
            "model.width=0.25",
            "data.crop=2",
        ],
        dense=["reduction.method=dense"],
        overlapped=["reduction.method=dense", "reduction.overlap=true"],
        oktopk_overlapped=["reduction.method=oktopk", "reduction.overlap=true"],
        nccl=["reduction.method=nccl"],
        ddp=["reduction.method=ddp"],
        oktopk=["reduction.method=oktopk"],
        nccl_half=["reduction.method=nccl", half],
        ddp_half=["reduction.method=ddp", half],
        oktopk_half=["reduction.method=oktopk", half],
    )
    assert codes == ["[0, 0]"] * len(runs)
    for name, run in runs.items():
        near = 0.5 if name.startswith("oktopk") else 0.05
        assert run.steps["loss"] == pytest.approx(runs["dense"].steps["loss"], rel=near), name
        for phase in ("data", "forward", "backward", "reduction", "optimizer"):
            assert np.all(run.steps[f"seconds_{phase}"] >= 0), (name, phase)
        assert np.all(run.steps["seconds_backward"] > 0), name


FAILING = """
    import sys, time
    from jobs.train.__main__ import check_launch, main
    from jobs.train.setup import build_workload

    config, file, when, method, overlap = sys.argv[1:6]

    def build(config, *, rank, size):
        workload = build_workload(config, rank=rank, size=size)
        steps = iter(range(1, 100))
        loss = workload.loss

        def failing(batch):
            if next(steps) == 3 and rank == 1:
                with open(when, "w") as written:
                    written.write(str(time.time()))
                raise RuntimeError("the disk of rank 1 is on fire")
            return loss(batch)

        workload.loss = failing
        return workload

    main([config, "--set", f"run.file={file}", "model.width=0.0625", "run.flush_every=1",
          f"reduction.method={method}", f"reduction.overlap={overlap}"], build=build)
"""


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    ("method", "overlap"),
    [
        ("oktopk", "false"),
        pytest.param(
            "dense", "true", marks=pytest.mark.long("`make test` has a rank that raises in Ok-Topk")
        ),
    ],
)
def test_a_rank_that_raises_ends_the_job_in_seconds(tmp_path: Path, method: str, overlap: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(FAILING))
    path, when = tmp_path / "run.h5", tmp_path / "when"
    began = time.time()
    done = run_ranks(2, str(script), str(CONFIG), str(path), str(when), method, overlap)
    ended, raised = time.time(), float(when.read_text())
    # under load, where a job takes longer to start than these ten seconds, no longer than to start
    assert ended - raised < max(10, raised - began)
    assert done.returncode not in (0, 2)
    assert "Traceback (most recent call last)" in done.stderr
    assert "RuntimeError: the disk of rank 1 is on fire" in done.stderr
    with RunReader(path) as reader:
        assert reader.status != "complete"
        assert reader.steps()["step"].tolist() == [1, 2]
