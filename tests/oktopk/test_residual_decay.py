"""Residuals that forget old updates."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import oktopk.torch
from oktopk import DistributedOptimizer
from oktopk.damage import StateError
from oktopk.torch.updates.residual_decay import ResidualDecay
from tests.training import steady
from tests.updates import own, reference, unsent


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_an_update_counts_by_its_age(power: float) -> None:
    decay, left, multiplied = ResidualDecay(power), 1.0, 0
    for exchange in range(1, 5001):
        factor = decay.count(moved=True)
        left *= factor
        multiplied += factor != 1.0
        due = (29 / (29 + exchange)) ** power
        assert due * (1 - 1e-12) <= left <= due / 0.97
    # in each of the first exchanges, and later once in some 3 % of what is over
    assert multiplied < power * math.log(5029 / 29) / 0.03


def test_rates_and_powers_of_zero_forget_nothing() -> None:
    decay, twin = ResidualDecay(2.0), ResidualDecay(2.0)
    factors = [decay.count(moved=True) for _ in range(9)]
    assert [decay.count(moved=False) for _ in range(99)] == [1.0] * 99
    for factor in factors:
        assert twin.count(moved=True) == factor != 1.0
    while decay.last == decay.exchanges:  # until some is still to be lost
        decay.count(moved=True)
    twin.load(decay.state())
    assert [twin.count(moved=True) for _ in range(99)] == [decay.count(moved=True) for _ in range(99)]
    none = ResidualDecay(0.0)
    assert {none.count(moved=True) for _ in range(99)} == {1.0}
    assert none.state() == [99, 99, 0.0]


def test_what_another_power_kept_is_not_lost_at_once() -> None:
    for before in (0.0, 0.01):
        saved, loaded = ResidualDecay(before), ResidualDecay(2.0)
        for _ in range(200):
            saved.count(moved=True)
        loaded.load(saved.state())
        assert loaded.count(moved=True) == 1.0 and loaded.count(moved=True) == 1.0
        assert loaded.count(moved=True) > 0.96 or before == 0.0


@pytest.mark.parametrize("state", [[3, 4, 2.0], [-1, -1, 2.0], [1], [2, 1, -1.0], [2, 1, math.nan]])
def test_a_damaged_state_is_refused(state: Any) -> None:
    with pytest.raises((StateError, ValueError)):
        ResidualDecay.check_state(state)


def run(
    comm: MPI.Intracomm, kind: Any, steps: int, group: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """The optimizer after some steps."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 25)
    inner = kind(layer.parameters(), **{"lr": 0.01, **(group or {})})
    optimizer: Any = steady(inner, comm, sends="updates", density=0.05, **settings)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return optimizer


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("over", "kind", "settings", "power"),
    [
        *(
            pytest.param("all", *case, marks=pytest.mark.mpi(min_size=2))
            for case in (
                (torch.optim.AdamW, {"method": "oktopk"}, 2.0),
                (torch.optim.AdamW, {"method": "union"}, 2.0),
                (torch.optim.SGD, {"method": "oktopk"}, 0.0),
                (torch.optim.AdamW, {"every": 2}, 0.0),
            )
        ),
        ("alone", torch.optim.AdamW, {}, 0.0),
        ("alone", torch.optim.AdamW, {"residual_decay": 1.0}, 1.0),
    ],
)
def test_only_adams_kind_in_each_step_forgets_by_default(
    comm: MPI.Intracomm, over: str, kind: Any, settings: dict[str, Any], power: float
) -> None:
    """Of several replicas; the first and the last exchange leave the share of the residual that is due."""
    ranks, every = MPI.COMM_SELF if over == "alone" else comm, settings.get("every", 1)
    first, kept = (run(ranks, kind, every, **settings | more) for more in ({}, {"residual_decay": 0}))
    assert kept.reducer.residual.any()
    left = kept.reducer.residual * np.float32((29 / 30) ** power)
    assert np.array_equal(first.reducer.residual, left)
    later, twin = (run(ranks, kind, 4 - every, **settings | more) for more in ({}, {"residual_decay": 0}))
    of_both = zip(twin.param_groups[0]["params"], later.param_groups[0]["params"], strict=True)
    for parameter, other in of_both:
        parameter.data.copy_(other.data)
    twin.load_state_dict(copy.deepcopy(later.state_dict()))
    for _ in range(every):
        for optimizer in (twin, later):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, 1.0 + ranks.rank)
            optimizer.step()
    due = np.float32(((28 + 4 // every) / (29 + 4 // every)) ** power)
    assert np.array_equal(later.reducer.residual, twin.reducer.residual * due)
    exchanges, _, saved = own(later)["forgetting"]
    assert (exchanges, saved, later.residual_decay) == (4 // every, power, power)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("still", ["frozen", "rate 0"])
def test_what_does_not_move_forgets_nothing(comm: MPI.Intracomm, still: str, ranks_per_host: int) -> None:
    """A layer without gradients on any rank, and one whose rate is 0 beside another one's."""
    torch.manual_seed(0)
    layers = [nn.Linear(30, 20), nn.Linear(20, 30)]
    groups = [{"params": layer.parameters()} for layer in layers]
    inner = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    hosts: dict[str, Any] = {"ranks_per_host": ranks_per_host}
    optimizer: Any = DistributedOptimizer(inner, comm, density=0.02, method="union", **hosts)
    generator = torch.Generator().manual_seed(comm.rank)
    held = []
    for step in range(9):
        for number, layer in enumerate(layers):
            for parameter in layer.parameters():
                rest = step >= 4 and number == 1
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                if rest and still == "frozen":
                    parameter.grad = None
        if step == 4 and still == "rate 0":
            optimizer.param_groups[1]["lr"] = 0.0
        optimizer.step()
        held.append([torch.from_numpy(unsent(optimizer)), *(each.weight.detach().clone() for each in layers)])
    first = sum(parameter.numel() for parameter in layers[0].parameters())
    for before, after in pairwise(held[4:]):
        left = after[0][first:] != 0
        assert left.any() and torch.equal(after[0][first:][left], before[0][first:][left])
        assert not torch.equal(after[0][:first], before[0][:first])
    if still == "frozen":
        assert torch.equal(held[4][2], held[-1][2])
    assert own(optimizer)["forgetting"][0] == 9


@pytest.mark.mpi(min_size=2)
def test_a_skipped_exchange_forgets_nothing(comm: MPI.Intracomm) -> None:
    optimizer = run(comm, torch.optim.AdamW, 3, nonfinite="skip")
    before = optimizer.reducer.residual.copy()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    assert before.any() and np.array_equal(optimizer.reducer.residual, before)
    assert own(optimizer)["forgetting"][0] == 3


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["oktopk", "union"])
def test_the_pass_that_selects_forgets_as_torchs_adamw(comm: MPI.Intracomm, method: str) -> None:
    vectors = []
    for kind in (torch.optim.AdamW, oktopk.torch.AdamW):
        optimizer = run(comm, kind, 8, {"eps": 1.0}, method=method)  # moves of unlike sizes
        assert own(optimizer)["forgetting"] == [8, 8, 2.0]
        vectors.append((optimizer.reducer.residual.copy(), reference(optimizer).numpy()))
    (one, one_reference), (other, other_reference) = vectors
    # an entry near the threshold may be sent by one of them alone
    assert np.mean(np.abs(one - other) > 1e-6) < 0.02
    assert np.mean(np.abs(one_reference - other_reference) > 1e-6) < 0.02
