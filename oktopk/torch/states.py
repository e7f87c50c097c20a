"""States as torch saves and loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensors(state: Any) -> Any:
    """A nested dict with tensors in place of arrays: torch.load reads those with weights_only, arrays not."""
    return _converted(state, np.ndarray, torch.from_numpy)


def as_arrays(state: Any) -> Any:
    """A nested dict with arrays on the host in place of tensors."""
    return _converted(state, Tensor, lambda tensor: tensor.cpu().numpy())


def _converted(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {name: _converted(value, kind, convert) for name, value in state.items()}
    return convert(state) if isinstance(state, kind) else state
