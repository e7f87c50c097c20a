"""States as torch saves and loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def by_rank(state: Any, rank: int = 0) -> dict[str, Any]:
    """A rank's own state under a key with its rank, which `oktopk.elastic.of_rank` takes away.

    `torch.distributed.checkpoint` keeps one of the values that ranks have under equal keys. It saves a tuple as one value, so
    that a new process need not have tensors to load it into.

    Args:
        rank: where torch has no process group; else the rank there, as several groups may have such states.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    return {f"rank-{rank}": (state,)}


def as_tensors(state: Any) -> Any:
    """A nested dict with tensors in place of arrays: torch.load reads those with weights_only, arrays not."""
    return _converted(state, np.ndarray, torch.from_numpy)


def as_arrays(state: Any) -> Any:
    """A nested dict with arrays on the host in place of tensors."""
    return _converted(state, Tensor, lambda tensor: tensor.cpu().numpy())


def on_host(state: Any) -> Any:
    """A nested dict with its tensors on the host; those that are there already are not copied."""
    return _converted(state, Tensor, Tensor.cpu)


def _converted(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {name: _converted(value, kind, convert) for name, value in state.items()}
    return convert(state) if isinstance(state, kind) else state
