"""The torch wrapper: what it steps on, and that it fits into a loop that others wrote."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import (
    METHODS,
    DistributedOptimizer,
    NonFiniteGradientError,
)
from tests.training import flat

pytestmark = pytest.mark.mpi

INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "sgd foreach": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=True
    ),
    "sgd in place": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def network() -> nn.Module:
    torch.manual_seed(5)
    # no bias before the batch norm: its gradient is rounding noise, which Adam would blow up to full steps
    return nn.Sequential(nn.Linear(20, 30, bias=False), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 7))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 20, generator=drawn), torch.randint(0, 7, (8,), generator=drawn)


def backward(model: nn.Module, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    nn.functional.cross_entropy(model(x), y).backward()


def train(
    comm: MPI.Intracomm, method: str, inner: str, steps: int, **settings: object
) -> tuple[nn.Module, DistributedOptimizer]:
    model = network()
    optimizer = DistributedOptimizer(
        INNER[inner](model.parameters()), comm, method, sends="gradients", **settings
    )
    go_on(model, optimizer, comm.rank, range(steps))
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


@pytest.mark.parametrize("inner", INNER)
def test_dense_equals_torchs_own_step_on_the_averaged_gradient(comm: MPI.Intracomm, inner: str) -> None:
    model, _ = train(comm, "dense", inner, steps=4)
    plain = network()
    optimizer = INNER[inner](plain.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(comm.size):
            x, y = batch(rank, step)
            (nn.functional.cross_entropy(plain(x), y) / comm.size).backward()
        optimizer.step()
    assert np.allclose(flat(model), flat(plain), rtol=1e-4, atol=1e-5)
    assert len(set(comm.allgather(flat(model).tobytes()))) == 1


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_that_works_in_place_gets_clean_gradients(comm: MPI.Intracomm, method: str) -> None:
    settings = {"density": 0.05, "threshold_interval": 3}
    in_place, _ = train(comm, method, "sgd in place", steps=6, **settings)
    plain = network()
    careful = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=False)
    optimizer = DistributedOptimizer(careful, comm, method, **settings)
    go_on(plain, optimizer, comm.rank, range(6))
    assert np.allclose(flat(in_place), flat(plain), rtol=1e-4, atol=1e-6)
    assert len(set(comm.allgather(flat(in_place).tobytes()))) == 1
    assert not np.array_equal(flat(plain), flat(network()))


def test_a_parameter_without_a_gradient_counts_as_zero(comm: MPI.Intracomm) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1, bias=False), "unused": nn.Linear(3, 1, bias=False)})
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, "dense")
    before = model["unused"].weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = None
    model["used"](torch.ones(1, 3)).sum().backward()
    if comm.rank == comm.size - 1:  # autograd made a new tensor; a user may put another one still
        model["used"].weight.grad = 2 * torch.ones(1, 3)
    weight = model["used"].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model["unused"].weight, before)
    assert torch.allclose(weight - model["used"].weight, torch.full((1, 3), (comm.size + 1) / comm.size))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_leaves_parameters_and_momenta_alone(
    comm: MPI.Intracomm, nonfinite: str
) -> None:
    model, optimizer = train(comm, "oktopk", "adam", steps=2, nonfinite=nonfinite)
    parameters, moments = flat(model), str(optimizer.inner.state_dict())
    optimizer.zero_grad()
    backward(model, comm.rank, 2)
    if comm.rank == 0:
        next(model.parameters()).grad[0, 0] = torch.nan
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=r"step 2: .* rank\(s\) 0"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.report.skipped
    assert np.array_equal(flat(model), parameters)
    assert str(optimizer.inner.state_dict()) == moments


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *((method, {}) for method in METHODS),
        ("oktopk", {"overlap": True, "bucket_mb": 0.002}),
    ],
    ids=str,
)
def test_a_reloaded_run_and_a_copy_continue_bit_for_bit(
    comm: MPI.Intracomm, method: str, more: dict[str, object]
) -> None:
    settings = {"density": 0.05, "threshold_interval": 3, "boundary_interval": 4} | more
    undisturbed, _ = train(comm, method, "sgd", steps=9, **settings)
    model, optimizer = train(comm, method, "sgd", steps=4, **settings)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    copied = copy.deepcopy((model, optimizer))
    assert copied[1].inner.param_groups[0]["params"][0] is next(copied[0].parameters())
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    resumed = network()
    resumed.load_state_dict(state["model"])
    continued = DistributedOptimizer(INNER["sgd"](resumed.parameters()), comm, method, **settings)
    continued.load_state_dict(state["optimizer"])
    before = flat(model)
    for each, its in (copied, (resumed, continued), (model, optimizer)):
        assert not np.array_equal(flat(each), flat(undisturbed))
        go_on(each, its, comm.rank, range(4, 9))
        assert np.array_equal(flat(each), flat(undisturbed))
        assert each is model or np.array_equal(flat(model), before)
    copied[1].close()


def test_learning_rate_schedulers_and_closures_work_on_the_wrapper(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    model = network()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, density=0.1)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3),
    ]

    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch(comm.rank, 0)[0]), batch(comm.rank, 0)[1])
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert float(loss.detach()) > 0
    assert optimizer.report.global_nnz > 0
    assert optimizer.step() is None
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    for schedule in schedules:
        schedule.step()
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.5 * 0.4)
    for _ in range(2):
        plateau.step(1.0)
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.02)
    assert not list(recwarn)  # that a scheduler stepped before the optimizer


def test_what_cannot_be_wrapped_is_named(comm: MPI.Intracomm) -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter"):
        DistributedOptimizer(torch.optim.SGD(frozen.parameters(), lr=1), comm)
    optimizer = DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1), comm)
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
