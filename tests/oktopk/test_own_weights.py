"""Optimizers that hold weights of their own: under updates they are refused, others are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from oktopk import DistributedOptimizer
from oktopk.torch.own_weights import keeps_weights
from tests.training import flat, network, squares


def layers() -> nn.Sequential:
    """With biases of zero and scales of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 3))
    nn.init.zeros_(model[0].bias)
    return model


class Masters(torch.optim.SGD):
    """Keeps copies under an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.kept = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]


class Lookahead(torch.optim.SGD):
    """Makes its slow weights in a later step, as its name tells."""


class Sam(torch.optim.Optimizer):
    """Steps at the top of a slope that it climbs first."""

    def __init__(self, parameters: Any, base: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.base = base(self.param_groups)

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=1e-3)

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old_p"]
        self.base.step()


def with_state(name: str, make: Callable[[Tensor], Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(layers().parameters(), lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {name: make(parameter.detach())}
    return optimizer


def in_group() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(layers().bfloat16().parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group["copies"] = [p.detach().float() for p in group["params"]]
    return optimizer


KEEPS: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "masters": lambda: Masters(layers().parameters()),
    "masters in a group": in_group,
    "Lookahead": lambda: Lookahead(layers().parameters(), lr=0.1),
    "a state of any name": lambda: with_state("w", torch.clone),
    "slow weights that are others by now": lambda: with_state("slow_buffer", torch.zeros_like),
    "z": lambda: with_state("z", torch.zeros_like),
}


@pytest.mark.parametrize("name", KEEPS)
def test_weights_of_an_optimizer_are_found(name: str) -> None:
    assert keeps_weights(KEEPS[name]())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=1.0),
        torch.optim.ASGD,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        torch.optim.Rprop,
        lambda p: torch.optim.RMSprop(p, centered=True),
    ],
    ids=["AdamW", "Adagrad", "ASGD", "SGD", "Rprop", "RMSprop"],
)
def test_torchs_own_optimizers_keep_none_before_and_after_steps(make: Any) -> None:
    model = layers()
    optimizer = make(model.parameters())
    assert not keeps_weights(optimizer)
    for _ in range(2):
        model(torch.ones(4, 20)).square().sum().backward()
        optimizer.step()
        assert not keeps_weights(optimizer)


def test_slow_momenta_and_lists_of_parameters_are_no_weights() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.flat = list(model.parameters())  # its two layers are equal
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg_slow"] = torch.zeros_like(parameter)
    assert not keeps_weights(optimizer)
    optimizer.flat = [parameter.detach().clone() for parameter in model.parameters()]
    assert keeps_weights(optimizer)


class LateMasters(torch.optim.SGD):
    """Makes its weights in its first step, under a name."""

    name = ""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault(self.name, parameter.detach().double())


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["master_param", "w32"])
def test_weights_made_by_the_first_step_are_refused(comm: MPI.Intracomm, name: str) -> None:
    model = network()
    inner = LateMasters(model.parameters(), lr=1e-3)
    inner.name = name
    optimizer = DistributedOptimizer(inner, comm, sends="updates")
    for step in range(2):
        optimizer.zero_grad()
        squares(model, comm.rank, step).backward()
        with pytest.raises(ValueError, match="LateMasters keeps weights beside the parameters, which"):
            optimizer.step()


class KeepsTheStart(torch.optim.SGD):
    """As optimizers do that measure how far they have come."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("p0", parameter.detach().clone())
        super().step()


@pytest.mark.mpi
def test_a_copy_of_the_start_is_no_weight(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = DistributedOptimizer(KeepsTheStart(model.parameters(), lr=0.0), comm, sends="updates")
    for step in range(3):
        optimizer.zero_grad()
        squares(model, comm.rank, step).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
    assert optimizer.report is not None and optimizer.report.step == 2


@pytest.mark.mpi(min_size=2)
def test_weights_beside_are_refused_alike_but_sams_base_trains(comm: MPI.Intracomm) -> None:
    def sgd(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=1e-3)

    model = network()
    kept = Masters(model.parameters()) if comm.rank else sgd(model.parameters())
    with pytest.raises(ValueError, match="ranks? 1.*: Masters keeps weights beside the parameters, which"):
        DistributedOptimizer(kept, comm, sends="updates")
    sam = Sam(model.parameters(), sgd)
    with pytest.raises(ValueError, match="Sam moves the parameters between two backward passes: wrap the"):
        DistributedOptimizer(sam, comm, sends="updates")
    sam.base = updates = DistributedOptimizer(sam.base, comm, density=0.1, sends="updates")
    before = copy.deepcopy(flat(model))
    for step in range(4):
        updates.zero_grad()
        squares(model, comm.rank, step).backward()
        sam.first_step()
        updates.zero_grad()
        squares(model, comm.rank, step).backward()
        sam.second_step()
    with updates.agreed():
        assert np.array_equal(flat(model), comm.bcast(flat(model)))
        assert not np.array_equal(flat(model), before)
