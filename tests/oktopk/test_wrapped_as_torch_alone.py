"""A wrapped optimizer in loops that others wrote: what they call works, or is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import oktopk.torch
from oktopk import DistributedOptimizer, GradientAllreduce
from tests.oktopk.test_as_torch_alone import Heads, backward, sgd
from tests.training import flat

pytestmark = pytest.mark.mpi

OVERLAP: dict[str, Any] = {"overlap": True, "bucket_mb": 0.0005}


@contextmanager
def default_type(kind: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Averaging(torch.optim.SGD):
    """As schedule-free optimizers: weights of their own in each of two modes."""

    mode = "train"

    def train(self) -> str:
        self.mode = "train"
        return self.mode

    def eval(self) -> str:
        self.mode = "eval"
        return self.mode


def test_what_only_the_wrapped_optimizer_has_is_passed_on(comm: MPI.Intracomm) -> None:
    optimizer: Any = DistributedOptimizer(Averaging(Heads().parameters(), lr=0.1), comm)
    assert optimizer.eval() == optimizer.mode == optimizer.inner.mode == "eval"
    assert optimizer.train() == "train"
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = optimizer.nothing_of_the_kind


@pytest.mark.parametrize(
    ("make", "method"),
    [(torch.optim.SGD, "oktopk"), (torch.optim.AdamW, "union"), (oktopk.torch.AdamW, "oktopk")],
)
def test_a_default_type_of_float64_changes_no_bit(comm: MPI.Intracomm, make: Any, method: str) -> None:
    results = []
    for default in (torch.float32, torch.float64):
        model = Heads()
        with default_type(default):
            optimizer = DistributedOptimizer(
                make(model.parameters(), lr=0.01), comm, density=0.1, method=method, threshold_interval=2
            )
        for number in range(4):
            backward(model, comm.rank, number)
            with default_type(default):
                optimizer.step()
                optimizer.zero_grad()
        results.append(flat(model))
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("settings", [{}, OVERLAP])
def test_a_step_that_is_compiled_is_left_as_it_is(comm: MPI.Intracomm, settings: dict[str, Any]) -> None:
    results = []
    for compiled in (False, True):
        model = Heads()
        optimizer = DistributedOptimizer(sgd(model), comm, density=0.1, **settings)

        def end(optimizer: DistributedOptimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(end, backend="eager") if compiled else end
        for number in range(3):
            backward(model, comm.rank, number)
            step()
        results.append(flat(model))
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize(
    ("settings", "how"), [({}, "optimizer"), ({}, "in place"), (OVERLAP, "optimizer"), (OVERLAP, "model")]
)
def test_gradients_that_are_only_looked_at_leave_no_trace(
    comm: MPI.Intracomm, settings: dict[str, Any], how: str
) -> None:
    results = []
    for looks in (False, True):
        model = Heads()
        optimizer = DistributedOptimizer(sgd(model), comm, "dense", **settings)
        for number in range(3):
            if looks:
                backward(model, comm.rank, 10 + number)
                if how == "optimizer":
                    optimizer.zero_grad()
                else:
                    model.zero_grad(set_to_none=how == "model")
            backward(model, comm.rank, number)
            optimizer.step()
            optimizer.zero_grad()
        results.append(flat(model))
    assert np.allclose(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_gradients_are_cleared_as_torch_clears_them(comm: MPI.Intracomm) -> None:
    model = Heads()
    optimizer = DistributedOptimizer(sgd(model), comm, density=0.1)
    backward(model, comm.rank, 0)
    optimizer.step()
    held = model.a.weight.grad
    optimizer.zero_grad(set_to_none=False)
    assert model.a.weight.grad is held and not held.any()  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert model.a.weight.grad is None


def test_an_mpi_that_was_not_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    started = SimpleNamespace(Is_initialized=lambda: False, Is_finalized=lambda: False)
    monkeypatch.setattr("collectives.mpi.MPI", started)  # as it is where mpi4py.rc.initialize is False
    named = r"MPI is to be used before MPI\.Init_thread\(\): where mpi4py\.rc\.initialize is False, call"
    with pytest.raises(RuntimeError, match=named):
        GradientAllreduce(None, 10)
    with pytest.raises(RuntimeError, match=named):
        DistributedOptimizer(sgd(Heads()))
