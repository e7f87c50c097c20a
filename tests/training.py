"""What tests of training on several ranks share: batches of a rank, a loss, all parameters as one vector."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


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
