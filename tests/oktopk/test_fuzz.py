"""States with random changes are refused by name on all ranks, or continued."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import oktopk
from oktopk import GradientAllreduce, NonFiniteGradientError
from oktopk.elastic import redistribute
from tests.training import network, squares, steady

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.long("minutes: 300 cases each; `make test` has 15 states with one change each"),
    pytest.mark.timeout(900),
]

CASES = 300
VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    2**61,
    1.5,
    float("nan"),
    float("inf"),
    "x\x1b",
    b"",
    [],
    {},
    (),
    True,
    "oktopk",
]


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies in nested containers."""
    inner = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged(state: Any, rng: random.Random, values: list[Any] = VALUES) -> Any:
    """A copy with one or two random changes."""
    state = copy.deepcopy(state)
    for _ in range(rng.randint(1, 2)):
        *outer, last = rng.choice(list(places(state)))
        holder = state
        for key in outer:
            holder = holder[key]
        value, kind = holder[last], rng.random()
        if kind < 0.2 and isinstance(holder, dict):
            del holder[last]
        elif kind < 0.6 and isinstance(value, np.ndarray | torch.Tensor) and len(value.shape):
            flat = value.reshape(-1)
            choices = [
                flat[:-1],
                value[None],
                flat * float("nan"),
                value.astype("f8") if isinstance(value, np.ndarray) else value.double(),
            ]
            holder[last] = rng.choice(choices)
        else:
            holder[last] = rng.choice(values)
    return state


def problem_of(
    comm: MPI.Intracomm, call: Callable[[], object], errors: tuple[type[Exception], ...] = (ValueError,)
) -> str:
    """Why a call fails, which all ranks are told alike; "" if it does not."""
    problem = ""
    try:
        call()
    except errors as error:
        problem = str(error)
    assert len(set(comm.allgather(problem))) == 1, problem
    return problem


def test_a_state_with_random_changes_is_refused_on_all_ranks_or_continued(comm: MPI.Intracomm) -> None:
    length, rng = 60, random.Random(7)
    gradient = np.random.default_rng(comm.rank).standard_normal(length).astype(np.float32)
    reducer = GradientAllreduce(comm, length, density=0.1, timeout=20.0)
    reducer.step(gradient)
    good, refused = reducer.state_dict(), 0
    every = comm.allgather(good)
    for case in range(CASES):
        victim = rng.randrange(comm.size)
        wrong = damaged(every[victim], rng)
        if case % 2:
            mine = wrong if comm.rank == victim else good
        else:  # as another number of ranks saved them
            saved = [
                {**state, "rank": r, "ranks": comm.size + 1} for r, state in enumerate([*every, every[0]])
            ]
            if isinstance(wrong, dict):
                wrong = {**wrong, **({"ranks": comm.size + 1} if wrong.get("ranks") == comm.size else {})}
            saved[victim] = wrong
            mine = redistribute(saved.__getitem__, comm.size + 1, comm.rank, comm.size)
        problem = problem_of(comm, partial(reducer.load_state_dict, mine))
        refused += bool(problem)
        if not problem:
            reducer.step(gradient)
            assert np.isfinite(reducer.update).all()
            reducer.load_state_dict(good)
    assert refused > CASES / 3
    reducer.step(gradient)


@pytest.mark.mpi(min_size=2)  # what one rank lacks the others have; one rank alone loads it as torch does
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {}),
        (oktopk.torch.AdamW, {}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"bucket_mb": 0.001}),
    ],
    ids=["updates", "updates in one pass", "gradients", "buckets"],
)
def test_a_damaged_optimizers_state_is_refused_on_all_ranks_or_continued(
    comm: MPI.Intracomm, kind: Callable[..., torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    rng, model = random.Random(9), network()
    optimizer = steady(kind(model.parameters(), lr=0.01), comm, density=0.05, timeout=60.0, **settings)

    def step() -> None:
        optimizer.zero_grad()
        squares(model, comm.rank, 0).backward()
        optimizer.step()

    for _ in range(2):
        step()
    good, refused = copy.deepcopy(optimizer.state_dict()), 0
    with optimizer.agreed():
        weights = copy.deepcopy(model.state_dict())

    def go_back() -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(good))

    every = comm.allgather(good)
    for _ in range(CASES):
        victim = rng.randrange(comm.size)
        wrong = damaged(every[victim], rng)
        mine = wrong if comm.rank == victim else copy.deepcopy(good)
        problem = problem_of(comm, partial(optimizer.load_state_dict, mine))
        refused += bool(problem)
        if not problem:
            problem_of(comm, step, (NonFiniteGradientError, ValueError))  # a setting parts the ranks
        go_back()
    assert refused > CASES / 3
    step()
