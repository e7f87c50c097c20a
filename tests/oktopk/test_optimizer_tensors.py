"""The torch wrapper and the tensors it is given: devices, types and layouts, and one clear sentence for what it does not take."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import METHODS, DistributedOptimizer, average_buffers, broadcast_parameters
from tests.devices import get, need_gpus, on_gpus, torch_device
from tests.oktopk.test_as_torch_alone import Heads, backward
from tests.training import flat

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("method", "levels"),
    [*((method, {}) for method in METHODS), ("oktopk", {"levels": "hosts", "ranks_per_host": 2})],
    ids=str,
)
def test_every_step_subtracts_exactly_the_update_that_was_reduced(
    comm: MPI.Intracomm, method: str, levels: dict[str, Any], place: torch.device
) -> None:
    """In two levels gradients are copied into memory that the host shares."""
    if place.type == "cuda":
        need_gpus(levels.get("ranks_per_host", 1))
    model = Heads().to(place)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(inner, comm, method, density=0.05, threshold_interval=3, **levels)
    for step in range(3):
        before = flat(model)
        optimizer.zero_grad()
        backward(model, comm.rank, step, share=0.01)  # by more, the parameters would explode
        optimizer.step()
        update = get(optimizer.reducer.update)
        assert np.array_equal(flat(model), before - update)
        assert 0 < np.count_nonzero(update) <= optimizer.report.global_nnz
        assert len(set(comm.allgather(flat(model).tobytes()))) == 1
    assert optimizer.report.levels == levels.get("levels", "flat")
    if levels and place.type == "cpu":
        assert np.shares_memory(optimizer._gradients.filled.numpy(), optimizer.reducer.gradient_buffer)


@pytest.mark.parametrize("parameter_type", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_one_type_reach_parameters_of_another(
    comm: MPI.Intracomm, device: str, parameter_type: torch.dtype
) -> None:
    place = torch_device(device, comm)
    weights = torch.arange(300, device=place, dtype=parameter_type) - 150  # exact in every type
    for gradient_type in ("float32", "bfloat16", "float16"):
        parameter = nn.Parameter(torch.zeros(300, dtype=parameter_type, device=place))
        inner = torch.optim.SGD([parameter], lr=1.0)
        if device == "cpu" and gradient_type != "float32":
            sentence = f"gradient_type '{gradient_type}' on cpu is not one of float32"
            with pytest.raises(ValueError, match=sentence):
                DistributedOptimizer(inner, comm, "dense", gradient_type=gradient_type)
            continue
        optimizer = DistributedOptimizer(inner, comm, "dense", gradient_type=gradient_type)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):  # two backward passes add up
                (parameter * weights * (comm.rank + 1)).sum().backward()
            optimizer.step()
        expected = torch.zeros(300, dtype=parameter_type, device=place)
        mean = weights.float() * (comm.size + 1)  # 2 * sum(r + 1) / size
        for _ in range(2):
            expected -= mean.to(parameter_type)
        assert torch.allclose(parameter.detach().float(), expected.float(), rtol=0.02)
        assert parameter.dtype == parameter_type


def test_channels_last_parameters_keep_their_layout_and_their_values(
    comm: MPI.Intracomm, place: torch.device
) -> None:
    plain, last = Heads().to(place), Heads().to(place)
    last = last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for model in (plain, last):
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, "dense")
        for step in range(3):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            assert all(p.grad.stride() == p.stride() for p in model.parameters())
            optimizer.step()
        optimizer.close()
    assert last.body.weight.is_contiguous(memory_format=torch.channels_last)
    assert np.allclose(flat(plain), flat(last), rtol=1e-3, atol=1e-4)


def test_a_state_written_contiguously_takes_the_layout_of_its_parameters(
    comm: MPI.Intracomm, device: str
) -> None:
    place = torch_device(device, comm)

    def fresh() -> tuple[nn.Module, DistributedOptimizer]:
        model = Heads().to(place).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        return model, DistributedOptimizer(inner, comm, "oktopk", density=0.1)

    model, optimizer = fresh()
    backward(model, comm.rank, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    resumed, continued = fresh()
    resumed.load_state_dict(model.state_dict())
    for held in state["state"].values():
        held["momentum_buffer"] = held["momentum_buffer"].contiguous().cpu()
    continued.load_state_dict(state)
    for parameter in resumed.parameters():
        buffer = continued.inner.state[parameter]["momentum_buffer"]
        assert (buffer.stride(), buffer.device) == (parameter.stride(), parameter.device)
    for one, other in ((model, optimizer), (resumed, continued)):
        other.zero_grad()
        backward(one, comm.rank, 1)
        other.step()
        other.close()
    assert np.allclose(flat(resumed), flat(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["dense", "oktopk"])
def test_clipping_bounds_the_norm_of_the_reduced_gradient_and_no_other(
    comm: MPI.Intracomm, method: str, place: torch.device
) -> None:
    plain, clipped = Heads().to(place), Heads().to(place)
    settings = {"density": 0.1, "threshold_interval": 1}

    def update(model: nn.Module, step: int, clip_norm: float) -> np.ndarray:
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), comm, method, clip_norm=clip_norm, **settings
        )
        before = flat(model)
        backward(model, comm.rank, step)
        optimizer.step()
        optimizer.close()
        return before - flat(model)

    whole = update(plain, 0, 0.0)
    norm = float(np.linalg.norm(whole))
    halved = update(clipped, 0, norm / 2)
    assert np.linalg.norm(halved) == pytest.approx(norm / 2, rel=1e-3)
    assert np.allclose(halved, whole / 2, rtol=1e-2, atol=1e-5 * norm)
    untouched = update(Heads().to(place), 0, 2 * norm)
    assert np.allclose(untouched, whole, rtol=1e-3, atol=1e-5 * norm)


def test_a_clipped_update_is_zero_off_the_next_ones_support(comm: MPI.Intracomm) -> None:
    model = Heads()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), comm, "oktopk", clip_norm=1e-3, density=0.05
    )
    for step in range(4):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
        assert np.count_nonzero(optimizer.reducer.update) <= optimizer.report.global_nnz


def test_between_reduce_and_apply_the_gradients_are_the_update(comm: MPI.Intracomm) -> None:
    model = Heads()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, "oktopk", density=0.1)
    for step in range(3):
        before = flat(model)
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.reduce()
        seen = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy().copy()
        assert np.array_equal(seen, optimizer.reducer.update)
        with pytest.raises(RuntimeError, match=r"reduce\(\) again before apply\(\)"):
            optimizer.reduce()
        next(model.parameters()).grad.mul_(0.5)  # as a loop of one's own may
        seen[: next(model.parameters()).numel()] *= 0.5
        optimizer.apply()
        assert np.array_equal(flat(model), before - seen)
        assert np.array_equal(flat(model) != before, seen != 0)
    optimizer.apply()  # nothing was reduced since: nothing to apply
    assert np.array_equal(flat(model), before - seen)


@on_gpus
def test_another_current_stream_is_waited_for_on_both_sides(comm: MPI.Intracomm) -> None:
    place = torch_device("cuda", comm)
    parameter = nn.Parameter(torch.zeros(1 << 22, device=place))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), comm, "dense")
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(5):
            optimizer.zero_grad()
            gradient = torch.zeros_like(parameter)
            torch.cuda._sleep(10_000_000)
            parameter.grad = gradient.fill_(1.0)
            optimizer.step()
    other.synchronize()
    assert torch.equal(parameter.detach(), torch.full_like(parameter, -5.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_gpu_that_is_not_the_current_one_is_named(comm: MPI.Intracomm) -> None:
    place = torch_device("cuda", comm)
    other = (place.index + 1) % torch.cuda.device_count()
    parameter = nn.Parameter(torch.zeros(3, device=f"cuda:{other}"))
    with pytest.raises(ValueError, match=rf"torch\.cuda\.set_device\({other}\)"):
        DistributedOptimizer(torch.optim.SGD([parameter], lr=1), comm)


def test_modules_are_broadcast_and_averaged_where_they_lie(comm: MPI.Intracomm, device: str) -> None:
    place = torch_device(device, comm)
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2, dtype=torch.bfloat16))
    model = model.to(place)
    model[0].weight.data = model[0].weight.data.contiguous(memory_format=torch.channels_last)
    model[1].register_buffer("flag", torch.tensor(comm.rank == 0, device=place))
    broadcast_parameters(model, comm)
    mine = [
        t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        for t in model.state_dict().values()
    ]
    assert len({tuple(theirs) for theirs in comm.allgather(mine)}) == 1
    assert bool(model[1].flag)
    assert all(tensor.device == place for tensor in model.state_dict().values())
    torch.manual_seed(0)
    assert torch.equal(model[0].weight.cpu(), nn.Conv2d(3, 4, 3).weight)
    model[1].running_mean.fill_(comm.rank)
    model[1].num_batches_tracked.fill_(comm.rank)
    average_buffers(model, comm)
    assert torch.allclose(model[1].running_mean, torch.full((4,), (comm.size - 1) / 2, device=place))
    assert model[1].num_batches_tracked == comm.rank  # a counter
    average_buffers(nn.Linear(2, 2), comm)
