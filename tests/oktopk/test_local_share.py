"""The share of its residual that a replica's parameters hold, by exchanges and as the learning rate falls."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.damage import StateError
from oktopk.elastic import of_rank
from oktopk.torch.local_share import LocalShare
from oktopk.torch.local_step import SHARED_BY

LATE = 500  # exchanges, after which a share no longer falls by their number


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_share_grows_as_the_rate_falls(kind: Any) -> None:
    share = LocalShare(0.05, varies=True)
    rates = [0.1, 0.4, 1.0, 0.5, 0.25, 0.1, 0.0, math.inf, 1e-6, 1.0, 2.0, 1.0]
    # up to the largest rate as at first, below it more, six times at most; rates that are no rates change nothing
    expected = [0.05, 0.05, 0.05, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.05, 0.05, 0.1]
    found = [share.renew([{"lr": kind(rate)}, {"lr": kind(rate / 9)}, {}], LATE) for rate in rates]
    assert found == pytest.approx(expected) and share.now == found[-1]


def test_a_share_begins_five_times_as_large_and_falls_with_the_exchanges() -> None:
    share, fixed = LocalShare(0.05, varies=True), LocalShare(0.05, varies=False)
    assert share.now == 0.25
    exchanges = [0, 1, 100, 125, 250, 499, 500, 501, 10**6]
    expected = [0.25, 0.25, 0.25, 0.2, 0.1, 25 / 499, 0.05, 0.05, 0.05]
    assert [share.renew([{"lr": 1.0}], each) for each in exchanges] == pytest.approx(expected)
    assert {fixed.renew([{"lr": 1.0}], each) for each in exchanges} == {0.05}
    small = LocalShare(0.05, varies=True, large=False)
    assert small.now == 0.05 and small.renew([{"lr": 1.0}], 1) == 0.05
    assert small.renew([{"lr": 0.5}], 2) == 0.1
    # the larger of both, not their product
    assert [share.renew([{"lr": 0.5}], each) for each in (100, 200, 400)] == pytest.approx([0.25, 0.125, 0.1])
    assert share.renew([{"lr": 0.1}], 1) == pytest.approx(0.3)


def test_a_share_is_one_at_most_and_one_that_is_given_stays() -> None:
    large, given = LocalShare(0.5, varies=True), LocalShare(0.05, varies=False)
    assert large.now == 1.0
    for share, least in ((large, 1.0), (given, 0.05)):
        assert [share.renew([{"lr": rate}], LATE) for rate in (1.0, 0.1)] == [share.state()[0], least]
    assert LocalShare(0.05, varies=True).renew([{}], LATE) == 0.25


def test_a_share_goes_on_from_a_state_and_another_one_has_grown_as_far() -> None:
    saved = LocalShare(0.05, varies=True)
    for rate in (1.0, 0.4):
        saved.renew([{"lr": rate}], LATE)
    same, other = LocalShare(0.05, varies=True), LocalShare(0.02, varies=True)
    given = LocalShare(0.7, varies=False)
    for share in (same, other, given):
        share.load(saved.state())
    assert [same.now, other.now, given.now] == pytest.approx([0.125, 0.05, 0.7])
    renewed = [share.renew([{"lr": 0.25}], LATE) for share in (same, other, given)]
    assert renewed == pytest.approx([0.2, 0.08, 0.7])
    same.load(given.state())  # which knows the largest rate, too
    assert [same.now, same.renew([{"lr": 0.25}], LATE)] == pytest.approx([0.05, 0.2])
    same.begin()
    assert [same.now, same.renew([{"lr": 0.25}], LATE)] == pytest.approx([0.25, 0.05])


@pytest.mark.parametrize(
    "state",
    [[0.05, 0.04, 1.0], [0.5, 1.1, 1.0], [-1, 0, 1], [0, 0, -1.0], [0, 0, math.inf], [0.5], ["a"] * 3],
)
def test_a_damaged_state_is_refused(state: Any) -> None:
    with pytest.raises((StateError, ValueError)):
        LocalShare.check_state(state)


SETTINGS: dict[str, Any] = {"density": 0.05, "method": "union"}


def train(comm: MPI.Intracomm, steps: range, start: Any = None, weights: Any = None, **settings: Any) -> Any:
    """The network and its optimizer after some steps of falling rates, each of which is checked."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    optimizer: Any = DistributedOptimizer(
        torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1), comm, **SETTINGS, **settings
    )
    if start is not None:
        network.load_state_dict(weights)
        optimizer.load_state_dict(start)
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(steps.stop):
        gradients = [torch.randn(p.shape, generator=generator) for p in network.parameters()]
        if step not in steps:
            continue
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.01 / max(1, step - 1)
        optimizer.step()
        share = optimizer.local_share / settings.get("ranks_per_host", 1)
        unsent = optimizer._reference.residual.vector.numpy()
        shown = optimizer._reference.vector.numpy() - np.float32(share) * unsent
        held = torch.cat([p.detach().flatten() for p in network.parameters()]).numpy()
        assert held.tobytes() == shown.tobytes() and unsent.any()
    return network, optimizer


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("settings", [{}, {"ranks_per_host": 2, "replica": "host"}, {"local_share": 0.05}])
def test_parameters_hold_the_share_of_each_step(comm: MPI.Intracomm, settings: dict[str, Any]) -> None:
    if "replica" in settings and (comm.size % 2 or comm.size == 2):
        pytest.skip("two hosts of two ranks at least, of as many each")
    _, optimizer = train(comm, range(9), **settings)
    first = optimizer._share.state()[0]
    grown = (
        min(1.0, 6 * first) if optimizer._replicas <= SHARED_BY and "local_share" not in settings else first
    )
    assert optimizer.local_share == pytest.approx(grown)
    assert f"local_share={grown:.3g}" in repr(optimizer)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("start", "large"),
    [
        ({"density_warmup_steps": 0}, False),
        ({"density_warmup_steps": 7, "first_density": 0.2}, False),
        ({"density_warmup_steps": 7}, True),
    ],
    ids=str,
)
def test_a_share_begins_large_where_the_density_does(
    comm: MPI.Intracomm, start: dict[str, Any], large: bool
) -> None:
    _, optimizer = train(comm, range(2), **start)
    first = optimizer._share.state()[0]
    assert optimizer.local_share == pytest.approx(5 * first if large and comm.size <= SHARED_BY else first)


@pytest.mark.mpi(min_size=2)
def test_at_rate_0_nothing_joins_the_residual_behind_a_share_that_grew(comm: MPI.Intracomm) -> None:
    """What parameters hold is read with the share that they were written with: the displacement still to come stays."""
    _, optimizer = train(comm, range(5), residual_decay=0)
    assert optimizer.local_share > 0.05 or comm.size > SHARED_BY

    def to_come() -> Any:
        unsent = optimizer._reference.residual.vector.double().numpy()
        return optimizer._reference.vector.double().numpy() - comm.allreduce(unsent) / comm.size

    before, unsent = to_come(), optimizer._reference.residual.vector.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(30):
        optimizer.step()
    assert np.allclose(to_come(), before, atol=1e-6)
    assert not torch.equal(optimizer._reference.residual.vector, unsent)  # some of it was sent


@pytest.mark.mpi(min_size=2)
def test_training_goes_on_from_a_state_bit_for_bit(comm: MPI.Intracomm) -> None:
    network, optimizer = train(comm, range(4))
    weights, state = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert comm.size > SHARED_BY or optimizer.local_share > 0.05
    _, again = train(comm, range(4, 7), state, weights)
    _, whole = train(comm, range(7))
    assert torch.equal(again._reference.vector, whole._reference.vector)
    assert torch.equal(again._reference.residual.vector, whole._reference.residual.vector)
    assert again._share.state() == whole._share.state()


@pytest.mark.mpi(min_size=2)
def test_states_without_a_share_begin_it_anew_and_one_that_was_given_grows_on(comm: MPI.Intracomm) -> None:
    network, optimizer = train(comm, range(4), local_share=0.05)
    weights, state = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain = torch.optim.AdamW(network.parameters(), lr=0.001)
    _, other = train(comm, range(4, 5), state, weights)
    first = other._share.state()[0]
    # five exchanges, so that it is as large as at first, though the rate has fallen to a third
    begun = 5 * first if comm.size <= SHARED_BY else first
    assert other.local_share == pytest.approx(begun)
    other.load_state_dict(plain.state_dict())
    assert other._share.state() == [first, begun, 0.0]
    assert other._reference.share == begun


@pytest.mark.mpi(min_size=2)
def test_a_state_whose_share_is_damaged_is_refused_on_all_ranks(comm: MPI.Intracomm) -> None:
    _, optimizer = train(comm, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    of_rank(state["updates"])["local_share"] = [0.05, 0.01, 1.0]
    with pytest.raises(ValueError, match=r"share of the state is 0.01 of first 0.05"):
        optimizer.load_state_dict(state)
