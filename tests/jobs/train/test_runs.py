"""Training on ranks that are up: what ends every rank alike, and what a step does not wait for."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from jobs.report.summary import read_runs
from jobs.run.columns import PHASES
from jobs.run.file import RunFile
from jobs.run.reader import RunReader
from jobs.train.__main__ import main
from jobs.train.agreement import RanksDiverged, check_same_parameters
from jobs.train.reduce.process_group import stop_process_group
from jobs.train.setup import Build, build_workload
from jobs.train.tasks.task import Workload
from tests.launched import PATIENCE, outcome

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "digits.toml"

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(PATIENCE)]


@pytest.fixture
def folder(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    folder: Path = comm.bcast(tmp_path)
    return folder


def train(
    comm: MPI.Intracomm,
    path: Path,
    *overrides: str,
    build: Build = build_workload,
    options: tuple[str, ...] = (),
) -> tuple[int, str]:
    words = [str(CONFIG), "--set", f"run.file={path}", *overrides, *options]
    return outcome(comm, lambda: main(words, comm=comm, build=build))


def unreadable_on_rank_1(config: Any, *, rank: int, size: int) -> Workload:
    if rank == 1:
        raise PermissionError(13, "Permission denied", "data.h5")
    return build_workload(config, rank=rank, size=size)


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_done_is_said_once(comm: MPI.Intracomm, folder: Path) -> None:
    path, taken = folder / "run.h5", folder.with_name("taken.h5")
    if comm.rank == 0:
        taken.write_text("precious")
    comm.barrier()
    samples = comm.size * (899 // comm.size + 1)
    for overrides, message in (
        (
            ["reduction.densty=0.1"],
            r"reduction\.densty: unknown key in \[reduction\] .*; valid: method, .*density, .*",
        ),
        ([f"run.file={folder}"], rf"run file {folder} is not a regular file"),
        ([f"run.file={taken}"], rf"run file {taken} exists: choose another name \(run\.file\) or allow .*"),
        ([f"training.batch_size={samples // comm.size}"], rf"899 samples are fewer than .*{samples}.*"),
        (["data.name=prepared", f"data.path={folder}/none.h5"], rf"{folder}/none\.h5: no such file.*"),
        (
            ["reduction.gradient_type=bfloat16"],
            r"all ranks: gradient_type 'bfloat16' on cpu is not one of float32",
        ),
        (["reduction.method=nccl"], r"reduction\.method 'nccl' needs GPUs, and this run is on cpu: .*"),
        (
            ["training.accumulate=500"],
            r"training\.accumulate 500 is more than the \d+ batches of an epoch",
        ),
    ):
        status, said = train(comm, path, *overrides)
        assert (status, bool(re.fullmatch(rf"jobs\.train: {message}\n", said))) == (2, True), said
    status, said = train(comm, path, options=("--no-such-option",))
    assert status == 2
    assert re.fullmatch(r"usage: (.|\n)*unrecognized arguments: --no-such-option\n", said)
    status, said = train(comm, path, build=unreadable_on_rank_1)
    assert status == 2
    assert re.fullmatch(r"jobs\.train: rank 1: .*Permission denied: 'data\.h5'\n", said)
    assert list(folder.iterdir()) == []
    assert taken.read_text() == "precious"
    comm.barrier()
    # not before, but in training: the progress bar comes first
    status, said = train(comm, path, "optimizer.lr=1e30", "model.width=0.0625", "training.steps=20")
    assert status == 1
    assert len(re.findall(r"jobs\.train: .*try a smaller optimizer\.lr", said)) == 1
    with RunReader(path) as reader:
        assert reader.status == "failed"


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ_are_named_on_every_rank(comm: MPI.Intracomm) -> None:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    check_same_parameters(model, comm, 7)
    nn.init.constant_(model.bias, 1.0 + (comm.rank == 1) * 1e-7)
    with pytest.raises(RanksDiverged, match=r"after step 8: \w+ on ranks \[0.*\]; \w+ on ranks \[1\]"):
        check_same_parameters(model, comm, 8)


def test_dense_modes_train_like_dense_or_tell_of_divergence(comm: MPI.Intracomm, folder: Path) -> None:
    settings = [
        "model.width=0.0625",
        "training.steps=4",
        "training.batch_size=4",
        "training.accumulate=2",
        "training.eval_every=4",
        "optimizer.clip_norm=0.5",
        "reduction.bucket_mb=0.01",
    ]
    modes = {"dense": [], "dense-ovlp": ["reduction.method=dense", "reduction.overlap=true"], "ddp": []}
    for mode, given in modes.items():
        more = given or [f"reduction.method={mode}"]
        status, said = train(comm, folder / f"{mode}.h5", *settings, *more)
        assert status == 0, said
    dense, overlapped, ddp = read_runs([folder / f"{mode}.h5" for mode in modes])
    assert overlapped.info.method == "dense-ovlp"  # as its row in tables is called
    assert overlapped.steps["words"] == pytest.approx(dense.steps["words"], rel=0.02)
    # torch's library does not count: what a ring sends
    ring = 2 * ddp.info.length * (comm.size - 1) // comm.size
    assert ddp.steps["words"] == pytest.approx([ring] * 4, abs=1)
    for run in (overlapped, ddp):
        assert run.steps["loss"] == pytest.approx(dense.steps["loss"], rel=1e-4)
        assert run.evaluations["loss"] == pytest.approx(dense.evaluations["loss"], rel=1e-3)
        assert run.steps["dense"].tolist() == [1] * 4
    wild = [
        "reduction.method=ddp",
        "optimizer.lr=1e30",
        "optimizer.clip_norm=0.0",
        "schedule.warmup=0",
    ]
    status, said = train(comm, folder / "diverged.h5", *settings, *wild)
    stop_process_group()  # of a run that failed before it closed
    assert status == 1
    assert len(re.findall(r"jobs\.train: .*try a smaller optimizer\.lr", said)) == 1
    with RunReader(folder / "diverged.h5") as reader:
        assert reader.status == "failed"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_methods_and_modes_train_alike_on_gpus(comm: MPI.Intracomm, folder: Path) -> None:
    if comm.size > torch.cuda.device_count():
        pytest.skip("NCCL takes one rank per GPU")
    common = [
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
    ]
    ways = {
        f"{method}-{kind}": [f"reduction.method={method}", f"reduction.gradient_type={kind}"]
        for method in ("nccl", "ddp", "oktopk")
        for kind in ("float32", "bfloat16")
    }
    ways |= {
        f"{method}-overlapped": [f"reduction.method={method}", "reduction.overlap=true"]
        for method in ("dense", "oktopk")
    }
    ways = {"dense": ["reduction.method=dense"], **ways}
    for name, way in ways.items():
        status, said = train(comm, folder / f"{name}.h5", *common, *way)
        assert status == 0, said
    dense, *others = read_runs([folder / f"{name}.h5" for name in ways])
    for run in others:
        near = 0.5 if run.info.method == "oktopk" else 0.05
        assert run.steps["loss"] == pytest.approx(dense.steps["loss"], rel=near), run.stem
        for phase in PHASES:
            assert (run.steps[f"seconds_{phase}"] >= 0).all(), (run.stem, phase)
        assert (run.steps["seconds_backward"] > 0).all(), run.stem


def test_writing_the_run_file_is_in_no_rank_s_step(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    written: list[float] = []
    append = RunFile.append_steps

    def slow(self: RunFile, *arguments: Any) -> None:
        append(self, *arguments)
        time.sleep(0.4)
        written.append(time.time())

    def build(config: Any, *, rank: int, size: int) -> Workload:
        workload = build_workload(config, rank=rank, size=size)
        loss = workload.loss

        def noting(batch: Any) -> Any:
            begun.append(time.time())
            return loss(batch)

        monkeypatch.setattr(workload, "loss", noting)
        return workload

    monkeypatch.setattr(RunFile, "append_steps", slow)
    settings = ["model.width=0.0625", "training.steps=4", "run.flush_every=1"]
    status, said = train(comm, folder / "run.h5", *settings, build=build)
    assert status == 0, said
    assert len(begun) == 4
    assert len(written) == (4 if comm.rank == 0 else 0)
    assert all(end <= start for end, start in zip(comm.bcast(written), begun[1:], strict=False))
