"""PowerSGD as a mode of training: what torch's hook sums, what is counted, and a state that goes on bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.reduce.powersgd import LowRank, low_rank
from jobs.train.reduce.process_group import (
    WireError,
    allow_p2p,
    ring_traffic,
)
from oktopk.elastic import redistribute
from tests.jobs.train.test_baselines import backward, flat, mean_gradient, network, powersgd, steps
from tests.launched import PATIENCE, outcome

CPU = torch.device("cpu")
CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "digits.toml"

pytestmark = [
    pytest.mark.timeout(PATIENCE),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo"),
]


def test_a_parameter_is_approximated_where_that_more_than_halves_it() -> None:
    # 2 (30 + 20) 1 < 30 x 20; a vector is a matrix of one column
    assert low_rank([(30, 20), (30,)], 1) == LowRank(30, 20, 30)
    assert low_rank([(30, 20)], 6) == low_rank([(600,)], 6) == LowRank(0, 0, 600)
    assert low_rank([(30, 20)], 5) == LowRank(150, 100, 0)
    assert low_rank([(512, 512, 3, 3)], 4) == LowRank(512 * 4, 512 * 9 * 4, 0)
    assert low_rank([], 1) == LowRank(0, 0, 0)


@pytest.mark.mpi
@pytest.mark.parametrize("bucket_mb", [0.004, 25.0])
def test_counted_words_are_those_that_the_hook_sums(
    gloo: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, bucket_mb: float
) -> None:
    training = powersgd(network(), gloo.size, bucket_mb=bucket_mb)
    summed: list[int] = []
    allreduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        summed.append(tensor.numel())
        return allreduce(tensor, *arguments, **keywords)

    monkeypatch.setattr(dist, "all_reduce", counting)
    for number in range(4):
        summed.clear()
        (words,) = steps(training, gloo.rank, range(number, number + 1))
        if number < 2:
            assert words == ring_traffic(training.length, gloo.size, 1).words
        else:
            # P, Q and what is summed whole, of each bucket; the one of 25 MB holds all
            assert len(summed) % 3 == 0 and (len(summed) == 3) == (bucket_mb == 25.0)
            assert words == ring_traffic(sum(summed), gloo.size, 1).words
            assert sum(summed) < training.length
    training.close()


@pytest.mark.mpi
def test_ranks_agree_and_keep_what_they_did_not_send(
    gloo: MPI.Intracomm,
) -> None:
    model = network()
    training = powersgd(model, gloo.size, rank=1)
    steps(training, gloo.rank, range(2))
    applied, entered = np.zeros(training.length), np.zeros(training.length)
    for number in range(2, 6):
        plain = network()
        plain.load_state_dict(model.state_dict())
        backward(plain, gloo.rank, number)
        gradients = [p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]
        entered += gloo.allreduce(torch.cat(gradients).numpy().astype(np.float64)) / gloo.size
        steps(training, gloo.rank, range(number, number + 1))
        applied += mean_gradient(model)
    residual = training.state_dict()["reducer"]["residual"]
    left = gloo.allreduce(residual.numpy().astype(np.float64)) / gloo.size
    assert np.abs(left).max() > 1e-3
    assert np.allclose(applied + left, entered, atol=1e-5)
    assert len(set(gloo.allgather(flat(model).tobytes()))) == 1
    training.close()


@pytest.mark.mpi
def test_errors_are_redistributed_to_other_ranks(gloo: MPI.Intracomm) -> None:
    model = network()
    training = powersgd(model, gloo.size)
    steps(training, gloo.rank, range(4))
    every = gloo.allgather(training.state_dict()["reducer"])
    fewer = redistribute(lambda saved: every[saved], gloo.size, 0, 1)
    total = sum(each["residual"].double() for each in every)
    assert torch.allclose(fewer["residual"].double(), total, atol=1e-6)
    more = redistribute(lambda saved: every[saved], gloo.size, gloo.size, gloo.size + 1)
    assert not more["residual"].any()
    training.load_state_dict({**training.inner.state_dict(), "reducer": more})
    assert np.isfinite(steps(training, gloo.rank, range(4, 6))).all()
    assert len(set(gloo.allgather(flat(model).tobytes()))) == 1
    training.close()


@pytest.mark.mpi
def test_a_gradient_of_zeros_stays_one(gloo: MPI.Intracomm) -> None:
    model = network()
    training = powersgd(model, gloo.size)
    for _ in range(4):
        training.zero_grad()
        backward(training.network, gloo.rank, 0, 0.0)
        training.reduce()
        training.apply()
    assert np.array_equal(flat(model), flat(network()))
    training.close()


@pytest.mark.mpi
def test_a_run_trains_and_refusals_are_sentences(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder: Path = comm.bcast(tmp_path)

    def train(name: str, *overrides: str) -> tuple[int, str]:
        words = [str(CONFIG), "--set", f"run.file={folder / name}.h5", "model.width=0.0625"]
        words += ["training.batch_size=4", "training.steps=8", "reduction.method=powersgd", *overrides]
        return outcome(comm, lambda: main(words, comm=comm))

    for overrides, message in (
        (["reduction.powersgd_start=1"], "powersgd_start = 1: Input should be greater than or equal to 2"),
        (
            ["reduction.gradient_type=bfloat16"],
            "reduction.gradient_type 'bfloat16' is not for 'powersgd': float32",
        ),
    ):
        status, said = train("refused", *overrides)
        assert (status, message in said, said.count("\n")) == (2, True, 1), said
    status, said = train(
        "run", "reduction.powersgd_start=3", "training.accumulate=2", "reduction.bucket_mb=0.05"
    )
    assert status == 0, said
    (run,) = read_runs([folder / "run.h5"])
    assert run.steps["words"][:3] == pytest.approx([2 * run.info.length * (comm.size - 1) // comm.size] * 3)
    assert comm.size == 1 or run.steps["words"][3:].max() < 0.5 * run.steps["words"][0]
    assert np.isfinite(run.steps["loss"]).all()


@pytest.mark.mpi
def test_a_state_of_another_rank_is_refused(gloo: MPI.Intracomm) -> None:
    training, narrower = (powersgd(network(), gloo.size, rank=rank) for rank in (2, 1))
    steps(training, gloo.rank, range(3))
    with pytest.raises(ValueError, match=r"a state of PowerSGD with .* elements in its buckets is not for"):
        narrower.load_state_dict(training.state_dict())


def test_parameters_without_dimensions_are_refused() -> None:
    model = network()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="parameters of at least one dimension, and scale has none"):
        powersgd(model, 1)


def test_nccl_is_kept_to_host_memory_for_a_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.train.reduce.process_group._p2p_allowed", [])
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    allow_p2p(False)
    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    allow_p2p(False)
    with pytest.raises(WireError, match=r"reduction\.nccl_p2p was False in an earlier run of this process"):
        allow_p2p(True)
