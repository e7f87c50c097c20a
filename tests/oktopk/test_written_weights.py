"""What all ranks write between steps of updates parts no ranks, though each rank's parameters hold other values before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from tests.training import flat, network

pytestmark = pytest.mark.mpi(min_size=2)


def take_steps(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    """On gradients of a rank's own."""
    for step in steps:
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
        optimizer.step()


def trained(
    comm: MPI.Intracomm, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[nn.Module, Any]:
    model = network().to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(inner, comm, density=0.05, sends="updates", **settings)
    take_steps(
        model, optimizer, comm.rank, range(25)
    )  # past the exchanges in which all ranks compare the reference
    return model, optimizer


def check_alike(model: nn.Module, optimizer: Any, comm: MPI.Intracomm, steps: range = range(25, 27)) -> None:
    """Ranks whose references have parted raise in a step."""
    take_steps(model, optimizer, comm.rank, steps)
    with optimizer.agreed():
        assert len(set(comm.allgather(flat(model).tobytes()))) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_weights_of_which_one_rank_holds_elements_already_are_loaded_on_all(
    comm: MPI.Intracomm, every: int
) -> None:
    model, optimizer = trained(comm, every=every)
    weight = model[0].weight
    mine = weight.detach().clone()
    given = network(9)[0].weight.detach().clone()
    for rank in range(comm.size):  # a row of each rank's own, with what it has not sent
        given[rank] = torch.from_numpy(comm.bcast(mine[rank].numpy(), rank))
    with torch.no_grad():
        weight.copy_(given)
    with optimizer.agreed():
        others = len(set(comm.allgather(flat(model).tobytes())))
    assert others > 1 or every > 1  # the case is as rare as meant here
    check_alike(model, optimizer, comm)
    with optimizer.agreed():
        assert (weight.detach() - given).abs().max() < 0.3  # of what was held before the load nothing stayed


def test_a_checkpoint_in_bfloat16_is_loaded_over_weights_that_round_to_it(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm, torch.bfloat16)
    with optimizer.agreed():
        saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    check_alike(model, optimizer, comm)


def test_weights_that_are_cut_after_each_step_are_cut_alike(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm)
    for step in range(25, 32):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(max=0.1)
        check_alike(model, optimizer, comm, range(step, step + 1))


def test_ranks_that_write_unlike_values_are_named(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm)
    with torch.no_grad():
        model[0].weight.fill_(comm.rank)
    with pytest.raises(ValueError, match="have parted: their hash is"):
        take_steps(model, optimizer, comm.rank, range(25, 26))
