"""Buckets reduced through peer memory beside computation and NCCL's collectives, for long, and where ranks do not agree."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer, GradientAllreduce
from oktopk.buckets import BucketedAllreduce
from tests.devices import get, gpus, on_torchs_gpu, put, torch_device

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_cuda(ranks=3)]

STEPS = 10_000
LEAST = 2_000
SECONDS = 45.0
"""The soak ends on all ranks after STEPS, or after these seconds with at least LEAST."""
TIMEOUT = 6.0


@pytest.fixture
def nccl(comm: MPI.Intracomm) -> Any:
    """A process group of NCCL's, for collectives in flight."""
    from jobs.train.reduce.process_group import start_process_group, stop_process_group

    if gpus() < comm.size:
        pytest.skip("a GPU a rank")
    place = torch_device("cuda", comm)
    start_process_group(comm, place)
    yield place
    torch.cuda.synchronize()
    stop_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", [on_torchs_gpu("cuda", id="cuda")])
def test_thousands_of_overlapped_steps_beside_matrix_products_and_nccl(
    comm: MPI.Intracomm, nccl: torch.device, device: str
) -> None:
    """Every multiprocessor has products to do, which NCCL's sums wait for on all ranks, and a backward pass for such a sum."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(nccl)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = DistributedOptimizer(inner, comm, overlap=True, bucket_mb=0.2, density=0.02, timeout=20.0)
    assert isinstance(optimizer.reducer, BucketedAllreduce)
    assert [bucket.p2p_unavailable_reason for bucket in optimizer.reducer.reducers] == [""] * 4
    assert optimizer.reducer.reducers[0].backend.device.priority < 0  # type: ignore[attr-defined]
    aside = torch.cuda.Stream()
    factor = torch.randn(2048, 2048, device=nccl, dtype=torch.bfloat16) / 50
    product, summed = factor.clone(), torch.ones(1 << 20, device=nccl)
    drawn = torch.Generator(device=nccl).manual_seed(comm.rank)
    deadline = time.monotonic() + SECONDS
    steps = 0
    while steps < STEPS:
        with torch.cuda.stream(aside):
            for _ in range(2):
                product = product @ factor
            summed += product[0, 0].float()
            dist.all_reduce(summed, dist.ReduceOp.AVG)
        inputs = torch.randn(16, 256, device=nccl, generator=drawn)
        optimizer.zero_grad()
        hidden = model(inputs)
        if steps % 2:  # as synchronized batch norm: the backward pass waits for the other ranks
            dist.all_reduce(hidden.detach().sum(0))
        hidden.square().mean().backward()
        optimizer.step()
        steps += 1
        if steps % 500 == 0 and comm.allreduce(time.monotonic() > deadline, MPI.LOR):
            break
    torch.cuda.synchronize()
    assert steps >= LEAST
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu().numpy()
    assert np.isfinite(values).all()
    assert len(set(comm.allgather(values.tobytes()))) == 1
    optimizer.close()
    if comm.rank == 0:
        print(f"{steps} overlapped steps in {time.monotonic() - deadline + SECONDS:.1f} s")


@pytest.mark.long("waits for the time limit; `make test` has a rank that leaves out a step")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", ["another order", "one bucket less"])
def test_ranks_that_start_other_buckets_all_raise_within_the_time_limit(
    comm: MPI.Intracomm, cuda: str, fault: str
) -> None:
    """Two reducers without a thread that orders them: what the rule of one order on all ranks is for."""
    reducers = [
        GradientAllreduce(comm, 20_000, device=cuda, peer_memory=True, density=0.02, timeout=TIMEOUT)
        for _ in range(2)
    ]
    rng = np.random.default_rng(comm.rank)
    gradients = [put(cuda, rng.standard_normal(20_000).astype(np.float32)) for _ in range(2)]
    for _ in range(3):
        for reducer, gradient in zip(reducers, gradients, strict=True):
            reducer.step(gradient)
    comm.Barrier()
    culprit = comm.size - 1
    order = [0, 1]
    if comm.rank == culprit:
        order = [1, 0] if fault == "another order" else [0]
    began = time.monotonic()
    said = ""
    try:
        for number in order:
            reducers[number].step(gradients[number])
    except RuntimeError as error:
        said = str(error)
    late = comm.rank == culprit and fault == "one bucket less"
    assert bool(said) != late
    comm.Barrier()
    if late:  # it hears of it in its next step, at the latest
        with pytest.raises(RuntimeError) as caught:
            reducers[1].step(gradients[1])
        said = str(caught.value)
    assert "did not come within" in said
    assert time.monotonic() - began < 4 * TIMEOUT
    for reducer in reducers:
        reducer.close()
    comm.Barrier()


def test_beside_other_streams_a_single_block_waits_and_no_bit_differs(
    comm: MPI.Intracomm, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collectives.cuda import device

    updates = []
    for priority in (0, -1):
        monkeypatch.setattr(device, "stream_priority", lambda stream, given=priority: given)
        reducer = GradientAllreduce(
            comm, 20_000, device=cuda, peer_memory=True, density=0.02, threshold_interval=4
        )
        rng = np.random.default_rng(comm.rank)
        for _ in range(6):
            reducer.step(put(cuda, rng.standard_normal(20_000).astype(np.float32) ** 3))
            updates.append(get(reducer.update).tobytes())
        launches = reducer._executors["oktopk"].launches  # type: ignore[attr-defined]
        assert (launches._device.priority < 0) == (priority < 0)
        reducer.close()
    assert updates[:6] == updates[6:]
