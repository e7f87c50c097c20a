"""A model that torch.compile has compiled trains as it does without, by the wrapped optimizer and by the hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk import DistributedOptimizer
from oktopk.torch import OkTopkState, ddp_hook


@pytest.mark.mpi(min_size=2)
@pytest.mark.long("compiles with g++; `make test` has the same steps without torch.compile")
@pytest.mark.parametrize("way", ["optimizer", "overlap", "hook", "adamw"])
def test_a_compiled_model_ends_with_the_same_bits(comm: MPI.Intracomm, group: Any, way: str) -> None:
    ended = []
    for compiled in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1)
        model: Any = network
        if way == "hook":
            reducer: Any = OkTopkState(density=0.1)
            model = DistributedDataParallel(network)
            model.register_comm_hook(reducer, ddp_hook)
        elif way == "adamw":  # sends updates
            inner = torch.optim.AdamW(network.parameters(), lr=0.01)
            optimizer = reducer = DistributedOptimizer(inner, density=0.1)
        else:
            optimizer = reducer = DistributedOptimizer(optimizer, density=0.1, overlap=way == "overlap")
        if compiled:
            model = torch.compile(model)
        drawn = torch.Generator().manual_seed(comm.rank)
        for _ in range(8):
            optimizer.zero_grad()
            inputs, targets = torch.randn(4, 30, generator=drawn), torch.randn(4, 2, generator=drawn)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        reducer.close()
        ended.append(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]))
    assert torch.equal(*ended)
