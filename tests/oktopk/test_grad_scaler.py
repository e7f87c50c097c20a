"""torch.amp.GradScaler around a wrapped optimizer: ranks keep one scale, and residuals hold gradients that are not scaled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.amp import GradScaler

from oktopk import DistributedOptimizer
from tests.devices import get

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself"),
]
LENGTH = 200


def reduced(
    comm: MPI.Intracomm, place: torch.device, **keywords: Any
) -> tuple[nn.Parameter, DistributedOptimizer]:
    parameter = nn.Parameter(torch.zeros(LENGTH, device=place))
    settings = {"density": 0.05, "threshold_interval": 3} | keywords
    return parameter, DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), comm, **settings)


def gradient(comm: MPI.Intracomm, step: int, place: torch.device) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 * step + comm.rank)
    return torch.randint(-50, 51, (LENGTH,), generator=drawn).float().to(place)


@pytest.mark.parametrize(
    ("method", "unscaled_by_user", "nonfinite"),
    [  # every pair of two of them
        *(("oktopk", False, "raise"), ("oktopk", True, "skip")),
        *(("gtopk", True, "raise"), ("gtopk", False, "skip")),
        *(("dense", True, "raise"), ("dense", False, "skip")),
    ],
)
def test_an_inf_on_one_rank_halves_every_scale_and_leaves_the_residual(
    comm: MPI.Intracomm, place: torch.device, method: str, unscaled_by_user: bool, nonfinite: str
) -> None:
    parameter, optimizer = reduced(comm, place, method=method, nonfinite=nonfinite)
    plain, reference = reduced(comm, place, method=method, nonfinite=nonfinite)
    scaler = GradScaler(place.type, init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(7):
        overflows = step in (2, 5)
        wanted = gradient(comm, step, place)
        optimizer.zero_grad()
        scaler.scale((parameter * wanted).sum()).backward()
        if overflows and comm.rank == comm.size - 1:
            parameter.grad[step] = torch.inf if step == 2 else torch.nan
        if unscaled_by_user:
            scaler.unscale_(optimizer)
            assert overflows or torch.equal(parameter.grad, wanted)
        residual = None if optimizer.reducer.residual is None else get(optimizer.reducer.residual).copy()
        assert scaler.step(optimizer) is None
        scaler.update()
        scales.append(scaler.get_scale())
        assert optimizer.report.skipped == overflows and optimizer.report.step == step
        if overflows:
            assert residual is None or np.array_equal(get(optimizer.reducer.residual), residual)
        else:
            reference.zero_grad()
            plain.grad = wanted.clone()
            reference.step()
            # scales are powers of two: a gradient that was scaled and unscaled has the same bits
            assert torch.equal(parameter, plain)
    assert scales == [1024, 2048, 1024, 1024, 2048, 1024, 1024]
    assert len(set(comm.allgather(tuple(scales)))) == 1
    if optimizer.reducer.residual is not None:
        assert np.array_equal(get(optimizer.reducer.residual), get(reference.reducer.residual))
