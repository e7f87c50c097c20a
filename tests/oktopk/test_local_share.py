"""The share of its residual that a replica's parameters hold, by exchanges and as the learning rate falls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.damage import StateError
from oktopk.torch import AdamW as OurAdamW
from oktopk.torch import local_step
from oktopk.torch.local_step import SHARED_BY, most_share
from oktopk.torch.updates.local_share import LocalShare
from tests.training import flat
from tests.updates import own, reference, to_come, unsent

LATE = 500  # exchanges, after which a share no longer falls by their number


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_share_grows_as_the_rate_falls(kind: Any) -> None:
    share = LocalShare(0.05, varies=True)
    rates = [0.1, 0.4, 1.0, 0.5, 0.25, 0.1, 0.0, math.inf, 1e-6, 1.0, 2.0, 1.0]
    # up to the largest rate as at first, below it more, six times at most; rates that are no rates change nothing
    expected = [0.05, 0.05, 0.05, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.05, 0.05, 0.1]
    found = [share.renew([{"lr": kind(rate)}, {"lr": kind(rate / 9)}, {}], LATE) for rate in rates]
    assert found == pytest.approx(expected) and share.now == found[-1]


def test_a_share_begins_large_and_falls_with_the_exchanges() -> None:
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


def test_a_share_is_at_most_one_and_a_fixed_one_stays() -> None:
    large, given = LocalShare(0.5, varies=True), LocalShare(0.05, varies=False)
    assert large.now == 1.0
    for share, least in ((large, 1.0), (given, 0.05)):
        assert [share.renew([{"lr": rate}], LATE) for rate in (1.0, 0.1)] == [share.state()[0], least]
    assert LocalShare(0.05, varies=True).renew([{}], LATE) == 0.25


def test_a_share_goes_on_from_a_state_of_another() -> None:
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


class SignsOfMomentum(torch.optim.Optimizer):
    """As Lion: it has `betas`, and is no Adam."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["betas"] == (0.9, 0.99)
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter -= group["lr"] * torch.sign(mean.lerp_(parameter.grad, 0.1))


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def train(
    comm: MPI.Intracomm, steps: range, start: Any = None, weights: Any = None, kind: Any = adamw, **more: Any
) -> Any:
    """The network and its optimizer after some steps of falling rates; each exchange is checked, bit for bit."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    optimizer: Any = DistributedOptimizer(kind(network.parameters(), lr=0.01), comm, **SETTINGS | more)
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
        if (step + 1) % more.get("every", 1):
            continue
        share, left = optimizer.local_share / more.get("ranks_per_host", 1), unsent(optimizer)
        shown = reference(optimizer).numpy() - np.float32(share) * left
        assert flat(network).tobytes() == shown.tobytes() and left.any()
    return network, optimizer


HOSTS: dict[str, Any] = {"ranks_per_host": 2, "replica": "host"}


@pytest.mark.mpi
@pytest.mark.also(ranks=4)
@pytest.mark.also(ranks=1)
@pytest.mark.parametrize(
    ("kind", "settings", "first", "varies"),
    [
        (adamw, {}, most_share, True),
        (OurAdamW, {}, most_share, True),
        (torch.optim.RAdam, {"method": "oktopk"}, most_share, True),
        (adamw, {"shared_by": 1}, lambda replicas: 0.05 / replicas**0.5, True),
        (adamw, {"every": 2}, lambda replicas: 1 / replicas, False),
        (adamw, {"local_share": 0.7}, lambda replicas: 0.7, False),
        (torch.optim.SGD, {"sends": "updates"}, lambda replicas: 1 / replicas, False),
        (SignsOfMomentum, {}, lambda replicas: 1 / replicas, False),
        (adamw, {"most": 0.9}, lambda replicas: 1 / replicas, True),
        pytest.param(adamw, HOSTS, most_share, True, marks=pytest.mark.mpi(min_size=4)),
    ],
)
def test_parameters_hold_the_share_of_each_step(
    comm: MPI.Intracomm,
    kind: Any,
    settings: dict[str, Any],
    first: Callable[[float], float],
    varies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default one over the replicas, of Adam's kind in each step `most_share`, which grows; all of it on one rank."""
    if "replica" in settings and comm.size % 2:
        pytest.skip("hosts of as many ranks each")
    settings = dict(settings)
    monkeypatch.setattr(local_step, "ADAM_SHARE", settings.pop("most", local_step.ADAM_SHARE))
    monkeypatch.setattr(local_step, "SHARED_BY", settings.pop("shared_by", local_step.SHARED_BY))
    _, optimizer = train(comm, range(10), kind=kind, **settings)
    replicas = optimizer.report.replicas
    share = 1.0 if replicas == 1 and "local_share" not in settings else first(replicas)
    assert own(optimizer)["local_share"][0] == pytest.approx(share)
    if varies and replicas <= SHARED_BY:
        share = min(1.0, 6 * share)
    assert optimizer.local_share == pytest.approx(share)
    assert f"local_share={share:.3g}" in repr(optimizer)


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
    first = own(optimizer)["local_share"][0]
    assert optimizer.local_share == pytest.approx(5 * first if large and comm.size <= SHARED_BY else first)


@pytest.mark.mpi(min_size=2)
def test_a_share_that_grew_loses_nothing_at_rate_0(comm: MPI.Intracomm) -> None:
    """What parameters hold is read with the share that they were written with: the displacement still to come stays."""
    _, optimizer = train(comm, range(5), residual_decay=0)
    assert optimizer.local_share > 0.05 or comm.size > SHARED_BY

    before, left = to_come(optimizer, comm), unsent(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(30):
        optimizer.step()
    assert np.allclose(to_come(optimizer, comm), before, atol=1e-6)
    assert not np.array_equal(unsent(optimizer), left)  # some of it was sent


@pytest.mark.mpi(min_size=2)
def test_training_goes_on_from_a_state_bit_for_bit(comm: MPI.Intracomm) -> None:
    network, optimizer = train(comm, range(9))
    weights, state = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())
    first = own(optimizer)["local_share"][0]
    assert comm.size > SHARED_BY or optimizer.local_share > 5 * first  # as large as it is not at first
    _, again = train(comm, range(9, 12), state, weights)
    _, whole = train(comm, range(12))
    assert torch.equal(reference(again), reference(whole))
    assert np.array_equal(unsent(again), unsent(whole))
    assert own(again)["local_share"] == own(whole)["local_share"]


@pytest.mark.mpi(min_size=2)
def test_states_without_a_share_begin_it_anew_and_it_grows(comm: MPI.Intracomm) -> None:
    network, optimizer = train(comm, range(4), local_share=0.05)
    weights, state = copy.deepcopy(network.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain = torch.optim.AdamW(network.parameters(), lr=0.001)
    _, other = train(comm, range(4, 5), state, weights)
    first = own(other)["local_share"][0]
    # five exchanges, so that it is as large as at first, though the rate has fallen to a third
    begun = 5 * first if comm.size <= SHARED_BY else first
    assert other.local_share == pytest.approx(begun)
    other.load_state_dict(plain.state_dict())
    assert own(other)["local_share"] == [first, begun, 0.0] and own(other)["share"] == begun
