"""The torch wrapper: what it steps on, and that it fits into a loop that others wrote."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from tests.replicas import layers
from tests.training import flat, loss, train

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=1)]

INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "sgd foreach": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2, foreach=True
    ),
    "sgd in place": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


class Words(nn.Module):
    """A table whose rows are looked up by the signs of the inputs, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.out = nn.Embedding(40, 6, sparse=True), nn.Linear(6, 7)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.out(self.words(2 * torch.arange(20) + (inputs > 0)).mean(1))


def wrap(model: nn.Module, comm: MPI.Intracomm, inner: str, **settings: Any) -> DistributedOptimizer:
    return DistributedOptimizer(INNER[inner](model.parameters()), comm, sends="gradients", **settings)


@pytest.mark.parametrize("inner", INNER)
def test_dense_equals_torchs_own_step_on_the_averaged_gradient(comm: MPI.Intracomm, inner: str) -> None:
    model, plain = layers(), layers()
    train(model, wrap(model, comm, inner, method="dense"), comm.rank, range(4))
    optimizer = INNER[inner](plain.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(comm.size):
            (loss(plain, rank, step) / comm.size).backward()
        optimizer.step()
    assert np.allclose(flat(model), flat(plain), rtol=1e-4, atol=1e-5)
    assert len(set(comm.allgather(flat(model).tobytes()))) == 1


@pytest.mark.parametrize("method", ["dense", "oktopk", "union"])
def test_an_optimizer_that_works_in_place_gets_clean_gradients(comm: MPI.Intracomm, method: str) -> None:
    settings: dict[str, Any] = {"density": 0.05, "threshold_interval": 3}
    in_place, plain = layers(), layers()
    train(in_place, wrap(in_place, comm, "sgd in place", method=method, **settings), comm.rank, range(6))
    careful = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=False)
    train(plain, DistributedOptimizer(careful, comm, method, **settings), comm.rank, range(6))
    assert np.allclose(flat(in_place), flat(plain), rtol=1e-4, atol=1e-6)
    assert len(set(comm.allgather(flat(in_place).tobytes()))) == 1
    assert not np.array_equal(flat(plain), flat(layers()))


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


@pytest.mark.parametrize(
    ("made", "inner", "more"),
    [
        (layers, "sgd", {}),
        (layers, "sgd", {"method": "dense"}),
        (layers, "sgd", {"overlap": True, "bucket_mb": 0.002}),
        (Words, "adagrad", {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_reloaded_run_continues_bit_for_bit(
    comm: MPI.Intracomm, made: Callable[[], nn.Module], inner: str, more: dict[str, Any]
) -> None:
    settings = {"density": 0.05, "threshold_interval": 3, "boundary_interval": 4} | more
    undisturbed, model, resumed = made(), made(), made()
    train(undisturbed, wrap(undisturbed, comm, inner, **settings), comm.rank, range(9))
    optimizer = wrap(model, comm, inner, **settings)
    train(model, optimizer, comm.rank, range(4))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    resumed.load_state_dict(state["model"])
    continued = wrap(resumed, comm, inner, **settings)
    continued.load_state_dict(state["optimizer"])
    before = flat(model)
    for each, its in ((resumed, continued), (model, optimizer)):
        assert not np.array_equal(flat(each), flat(undisturbed))
        train(each, its, comm.rank, range(4, 9))
        assert np.array_equal(flat(each), flat(undisturbed))
        assert all(report.step == its.report.step == 8 for report in its.table_reports)
        assert each is model or np.array_equal(flat(model), before)


def test_learning_rate_schedulers_and_closures_work_on_the_wrapper(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    model = layers()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, density=0.1)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3),
    ]

    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        error = loss(model, comm.rank, 0)
        error.backward()
        return error

    error = optimizer.step(closure)
    assert float(error.detach()) > 0
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
