"""What others do with any torch optimizer works with a wrapped one: copies, hooks, states, schedulers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from tests.training import flat, network, train, wrapped

pytestmark = pytest.mark.mpi


def test_it_cannot_be_pickled_and_still_works_after_an_attempt(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrapped(model, comm)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"a DistributedOptimizer cannot be pickled.*state_dict\(\)"):
            attempt(optimizer)
    train(model, optimizer, comm.rank, range(1))


def test_hooks_are_called_once_around_what_they_belong_to(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrapped(model, comm)
    called: list[str] = []

    def hook(name: str) -> Any:
        return lambda *arguments: called.append(name)

    optimizer.register_step_pre_hook(hook("before step"))
    optimizer.register_step_post_hook(hook("after step"))
    optimizer.register_state_dict_pre_hook(hook("before state"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.append(state.pop("mine")))
    optimizer.register_load_state_dict_post_hook(hook("after load"))
    train(model, optimizer, comm.rank, range(1))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert called == ["before step", "after step", "before state", 1, "after load"]
    assert state["mine"] == 1  # the caller's dictionary is not changed


def test_a_plain_state_is_loaded_with_empty_residuals_and_a_warning(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train(model, plain, 0, range(2))  # one state on all ranks
    model = network()
    optimizer = wrapped(model, comm)
    train(model, optimizer, comm.rank, range(2))
    optimizer.load_state_dict(plain.state_dict())
    messages = [str(warning.message) for warning in recwarn]
    assert [("residuals start empty" in message) for message in messages] == [True] * (comm.rank == 0)
    assert optimizer.reducer.steps == 0
    assert optimizer.reducer.state_dict()["residual"] is None
    assert not optimizer.reducer.residual.any()
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.mpi(min_size=2)
def test_a_plain_state_on_one_rank_only_is_refused_on_all(comm: MPI.Intracomm) -> None:
    optimizer = wrapped(network(), comm)
    state = optimizer.state_dict()
    if comm.rank == 0:
        del state["reducer"]
    with pytest.raises(ValueError, match="ranks disagree on whether the state has residuals: rank 0: False"):
        optimizer.load_state_dict(state)


def test_a_step_that_sets_up_the_state_leaves_residuals(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrapped(model, comm)
    train(model, optimizer, comm.rank, range(2))
    residual, steps, before = optimizer.reducer.residual.copy(), optimizer.reducer.steps, flat(model)
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert np.array_equal(optimizer.reducer.residual, residual) and np.array_equal(flat(model), before)
    assert optimizer.state and optimizer.reducer.steps == steps
    optimizer.state.clear()
    if comm.rank == 0:  # a warm-up that begins at a rate of 0
        next(model.parameters()).grad[0, 0] = 1.0
    optimizer.step()
    assert optimizer.reducer.steps == steps + 1
