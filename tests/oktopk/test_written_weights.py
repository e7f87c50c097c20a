"""What all ranks write between steps of updates parts no ranks, though each rank's parameters hold other values before."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import NonFiniteGradientError
from tests.training import flat, network, steady
from tests.updates import go_on_behind_the_first_exchanges

pytestmark = pytest.mark.mpi(min_size=2)

HOSTS = {"replica": "host", "ranks_per_host": 2}


def take_steps(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    """On gradients of a rank's own."""
    for step in steps:
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
        optimizer.step()


def trained(
    comm: MPI.Intracomm, dtype: torch.dtype = torch.float32, steps: int = 4, **settings: Any
) -> tuple[nn.Module, Any]:
    """Between exchanges in which all ranks compare the reference, and at an exchange's end, but for an odd number of steps."""
    model = network().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = steady(inner, comm, density=0.05, sends="updates", **settings)
    go_on_behind_the_first_exchanges(optimizer)
    take_steps(model, optimizer, comm.rank, range(steps))
    return model, optimizer


def stand_still(optimizer: Any) -> None:
    """Steps move nothing from now on, but by what was not sent before."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-30


def alike(model: nn.Module, optimizer: Any, comm: MPI.Intracomm) -> bool:
    with optimizer.agreed():
        return len(set(comm.allgather(flat(model).tobytes()))) == 1


def rows_of_ranks(model: nn.Module, comm: MPI.Intracomm) -> dict[str, torch.Tensor]:
    """Other weights, of which a row a rank is that rank's own already."""
    weight, given = model[0].weight, network(9)[0].weight.detach().clone()
    for rank in range(comm.size):
        given[rank] = torch.from_numpy(comm.bcast(weight[rank].detach().numpy(), rank))
    return model.state_dict() | {"0.weight": given}


def of_rank_0(model: nn.Module, comm: MPI.Intracomm) -> dict[str, torch.Tensor]:
    return comm.bcast({name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    ("settings", "steps", "whose"),
    [
        ({}, 4, rows_of_ranks),
        ({"every": 2}, 4, rows_of_ranks),
        ({"every": 2}, 5, of_rank_0),  # between two exchanges
        pytest.param(HOSTS, 4, rows_of_ranks, marks=pytest.mark.mpi(min_size=3)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_loaded_stays_though_ranks_hold_parts_already(
    comm: MPI.Intracomm, settings: dict[str, Any], steps: int, whose: Callable[..., Any]
) -> None:
    model, optimizer = trained(comm, steps=steps, **settings)
    stand_still(optimizer)
    given = whose(model, comm)
    model.load_state_dict(given)
    take_steps(model, optimizer, comm.rank, range(steps, 10))
    assert alike(model, optimizer, comm)
    with optimizer.agreed():
        assert torch.equal(model[0].weight.detach(), given["0.weight"])


def as_it_is(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return model, optimizer


def from_its_state(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Another optimizer that goes on from the state, beside the model's own weights."""
    state = optimizer.state_dict()
    other = copy.deepcopy(model)
    inner = torch.optim.SGD(other.parameters(), lr=0.05)
    loaded = steady(inner, MPI.COMM_WORLD, density=0.05, sends="updates")
    loaded.load_state_dict(state)
    return other, loaded


@pytest.mark.parametrize("goes_on", [as_it_is, from_its_state])
def test_a_bfloat16_checkpoint_is_loaded_over_weights_that_round_alike(
    comm: MPI.Intracomm, goes_on: Callable[[nn.Module, Any], tuple[nn.Module, Any]]
) -> None:
    model, optimizer = trained(comm, torch.bfloat16)
    with optimizer.agreed():
        saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    model, optimizer = goes_on(model, optimizer)
    take_steps(model, optimizer, comm.rank, range(4, 6))
    assert alike(model, optimizer, comm)


def test_weights_that_are_cut_after_each_step_are_cut_alike(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm)
    for step in range(4, 9):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(max=0.1)
        take_steps(model, optimizer, comm.rank, range(step, step + 1))
        assert alike(model, optimizer, comm)


def test_what_is_loaded_before_a_state_is_set_up_stays(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = steady(torch.optim.AdamW(model.parameters(), lr=0.0), comm, density=0.05)
    given = network(9).state_dict()
    model.load_state_dict(given)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # as torch.distributed.checkpoint.state_dict takes one
    with optimizer.agreed():
        assert torch.equal(model[0].weight, given["0.weight"])


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(max=0.05)


@pytest.mark.parametrize("then", ["agreed", "state", "close"])
def test_what_ranks_write_outside_of_agreed_is_warned_of(comm: MPI.Intracomm, then: str) -> None:
    """A clamp of what each rank holds leaves other values on each; also where a state was saved in between."""
    model, optimizer = trained(comm, steps=6, local_share=0.5)
    clamp(model)
    if then == "state":
        optimizer.state_dict()
    with pytest.warns(UserWarning, match="parameters were written to since the last step"):
        if then == "close":
            optimizer.close()
            return
        with optimizer.agreed():
            pass
    take_steps(model, optimizer, comm.rank, range(6, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.agreed():
            clamp(model)
        assert alike(model, optimizer, comm)
        optimizer.close()
    assert len(set(comm.allgather(flat(model).tobytes()))) == 1


@pytest.mark.parametrize("taken", ["in the step", "before it"])
def test_writes_before_a_step_that_raises_are_warned_of(comm: MPI.Intracomm, taken: str) -> None:
    """Such a step does not compare what the ranks have taken."""
    model, optimizer = trained(comm, steps=6, local_share=0.5)
    clamp(model)
    if taken == "before it":
        optimizer.state_dict()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    with pytest.warns(UserWarning, match="parameters were written to since the last step"):
        assert not alike(model, optimizer, comm)
    take_steps(model, optimizer, comm.rank, range(6, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert alike(model, optimizer, comm)
