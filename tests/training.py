"""What tests of training on several ranks share: a network, batches of a rank, losses, all parameters as one vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from oktopk import DistributedOptimizer


def network(seed: int = 5) -> nn.Module:
    """20 inputs, seven outputs, statistics of batches."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 7))


def wrapped(model: nn.Module, comm: Any, **settings: Any) -> DistributedOptimizer:
    """SGD with momentum around all parameters of a model."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return DistributedOptimizer(inner, comm, **{"density": 0.05, "threshold_interval": 3} | settings)


def steady(optimizer: Any, *arguments: Any, **settings: Any) -> Any:
    """A DistributedOptimizer of the density that is asked for from its first step."""
    return DistributedOptimizer(optimizer, *arguments, **{"density_warmup_steps": 0} | settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Steps on the batches of a rank with these numbers; returns their losses."""
    losses = []
    for step in steps:
        losses.append(gradients(model, optimizer, rank, step))
        optimizer.step()
    return losses


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    """Compute those of a rank in a step, in place of the last ones; returns the loss."""
    optimizer.zero_grad()
    error = loss(model, rank, step)
    error.backward()
    return float(error.item())


def inputs(rank: int, step: int) -> torch.Tensor:
    """float32[8, 20], other ones on each rank and in each step."""
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: nn.Module, rank: int, step: int, **arguments: object) -> torch.Tensor:
    """Of seven outputs, which should be the first inputs."""
    batch = inputs(rank, step).to(next(model.parameters()).device)
    return nn.functional.mse_loss(model(batch, **arguments), batch[:, :7])


def squares(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The sum of all squared outputs."""
    total: torch.Tensor = model(inputs(rank, step)).square().sum()
    return total


def flat(model: nn.Module) -> NDArray[np.float32]:
    """A copy of all parameters."""
    return torch.cat([p.detach().float().cpu().reshape(-1) for p in model.parameters()]).numpy().copy()
