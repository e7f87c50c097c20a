"""Dense reduction as a mode of training: the mean of all gradients, whatever carries it and whenever it starts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

from collectives.traffic import Traffic
from jobs.restart.packing import Snapshot, unpack
from jobs.train.reduce.baselines import DdpTraining, DenseTraining, NcclTraining
from jobs.train.reduce.process_group import (
    WireError,
    ring_traffic,
    start_process_group,
    stop_process_group,
)
from tests.training import flat

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 7))


def backward(module: nn.Module, rank: int, step: int, share: float = 1.0) -> None:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 20, generator=drawn), torch.randint(0, 7, (8,), generator=drawn)
    nn.functional.cross_entropy(module(x), y).backward(torch.tensor(share))


def mean_gradient(module: nn.Module) -> np.ndarray:
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]).numpy().copy()


def nccl(model: nn.Module, ranks: int, *, clip_norm: float = 0.0) -> NcclTraining:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return NcclTraining(inner, clip_norm, torch.float32)


def ddp(model: nn.Module, ranks: int) -> DdpTraining:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return DdpTraining(inner, 0.0, model, bucket_mb=0.003)


def steps(training: DenseTraining, rank: int, numbers: range, model: nn.Module | None = None) -> list[int]:
    """Trains on the batches of these numbers; the words of each step. model: where DDP is not around it."""
    words = []
    for number in numbers:
        training.zero_grad()
        backward(getattr(training, "network", model), rank, number)
        words.append(training.reduce().words)
        training.apply()
    return words


@pytest.mark.mpi
@pytest.mark.parametrize("mode", [nccl, ddp])
def test_every_mode_steps_on_the_mean_of_all_gradients(
    gloo: MPI.Intracomm, mode: Callable[[nn.Module, int], DenseTraining]
) -> None:
    model, plain, comm = network(), network(), gloo
    training = mode(model, comm.size)
    module = training.network if isinstance(training, DdpTraining) else model
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        training.zero_grad()
        with training.no_sync():
            backward(module, comm.rank, 2 * step, 0.5)
        backward(module, comm.rank, 2 * step + 1, 0.5)
        report = training.reduce()
        training.apply()
        reference.zero_grad()
        for rank in range(comm.size):
            for number in (2 * step, 2 * step + 1):
                backward(plain, rank, number, 0.5 / comm.size)
        reference.step()
        assert (report.step, report.method, report.local_nnz) == (step, "dense", training.length)
        assert list(report.seconds) == ["allreduce"]
        assert np.allclose(
            mean_gradient(model), np.concatenate([p.grad.reshape(-1) for p in plain.parameters()]), atol=1e-6
        )
    assert np.allclose(flat(model), flat(plain), rtol=1e-4, atol=1e-5)
    assert len(set(comm.allgather(flat(model).tobytes()))) == 1
    training.close()


@pytest.mark.mpi
def test_clipping_in_a_mode_bounds_the_norm_of_the_mean(gloo: MPI.Intracomm) -> None:
    model = network()
    training = nccl(model, gloo.size, clip_norm=0.125)
    backward(model, gloo.rank, 0)
    training.reduce()
    assert np.linalg.norm(mean_gradient(model)) == pytest.approx(0.125, rel=1e-3)
    training.close()


@pytest.mark.mpi
def test_a_second_process_group_and_unknown_backends_are_refused(comm: MPI.Intracomm) -> None:
    start_process_group(comm, CPU)
    try:
        with pytest.raises(WireError, match="there is a process group already"):
            start_process_group(comm, CPU)
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    finally:
        stop_process_group()
    if not dist.is_nccl_available():
        with pytest.raises(WireError, match=r"torch .* has no nccl"):
            start_process_group(comm, torch.device("cuda", 0))


@pytest.mark.mpi
@pytest.mark.parametrize("done", [1, 5])
@pytest.mark.parametrize("mode", [nccl, ddp])
def test_a_state_goes_on_bit_for_bit(
    gloo: MPI.Intracomm, mode: Callable[[nn.Module, int], DenseTraining], done: int
) -> None:
    model, resumed_model = network(), network()
    training, resumed = (mode(each, gloo.size) for each in (model, resumed_model))
    steps(training, gloo.rank, range(done), model)
    taken = Snapshot()
    taken.take({"model": model.state_dict(), "optimizer": training.state_dict()})
    saved = unpack(taken.tree, taken.tensors)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for each, own in ((training, model), (resumed, resumed_model)):
        steps(each, gloo.rank, range(done, done + 4), own)
    ends = [Snapshot(), Snapshot()]
    for end, each, own in zip(ends, (training, resumed), (model, resumed_model), strict=True):
        end.take({"model": own.state_dict(), "optimizer": each.state_dict()})
    assert ends[0].tree == ends[1].tree
    for name, tensor in ends[0].tensors.items():
        assert tensor.numpy().tobytes() == ends[1].tensors[name].numpy().tobytes(), name
    assert resumed.reduce().step == done + 4


def test_a_ring_sends_two_times_its_share() -> None:
    assert ring_traffic(1000, 4, 3) == Traffic(6000, 18)
    assert ring_traffic(1000, 1, 3) == Traffic()


@pytest.mark.mpi
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_averages_or_needs_a_gpu_per_rank(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    from jobs.train.placement import find_placement

    device = find_placement("cuda", comm).device
    if comm.size > torch.cuda.device_count():
        with pytest.raises(WireError, match="NCCL takes one rank per GPU"):
            start_process_group(comm, device)
        return
    start_process_group(comm, device)
    parameter = nn.Parameter(torch.zeros(100_000, device=device))
    training = NcclTraining(torch.optim.SGD([parameter], lr=0.1), 0.0, dtype)
    parameter.grad = torch.full_like(parameter, float(comm.rank))
    report = training.reduce()
    assert torch.allclose(parameter.grad, torch.full_like(parameter, (comm.size - 1) / 2))
    assert report.words == ring_traffic(100_000 * dtype.itemsize // 4, comm.size, 1).words
    training.close()
