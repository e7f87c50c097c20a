"""An optimizer around another one."""

from __future__ import annotations

from typing import Any

import torch


class WrappedOptimizer(torch.optim.Optimizer):
    """Has the groups, the state and the defaults of the optimizer that it wraps, and none of its own.

    Args:
        inner: owns the parameters.

    Attributes:
        inner: as given.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # the base class is not initialised: it would make groups, state and defaults
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.inner.defaults
