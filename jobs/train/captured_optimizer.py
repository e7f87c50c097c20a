"""An optimizer's step as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oktopk.torch.optimizer import WrappedOptimizer


class CapturedOptimizer(WrappedOptimizer):
    """Steps of an optimizer replayed as one CUDA graph: no GPU stands still while Python walks through all parameters.

    The first step is the optimizer's own, which makes its state; the second one is captured. Learning rates may change from
    step to step. Where gradients lie elsewhere than in the capture, or something else of the groups has changed, the step is
    the optimizer's own.

    Args:
        inner: fused, and capturable where it has the choice. Its state must not be replaced but by `load_state_dict` here.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self._warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: list[Tensor | None] = []
        self._rates: list[Tensor] = []
        self._settings: list[dict[str, Any]] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped optimizer's."""
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: computes the gradients first, if given.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        if self._graph is None and self._warm:
            self._capture(gradients)
        if self._graph is None or not self._fits(gradients):
            with warnings.catch_warnings():
                # that a step of a capturable optimizer is not captured
                warnings.filterwarnings("ignore", "This instance was constructed with capturable")
                self.inner.step()
            self._warm = True
            return result
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            rate.fill_(group["lr"])
        self._graph.replay()
        return result

    def _fits(self, gradients: list[Tensor | None]) -> bool:
        same = all(a is b for a, b in zip(gradients, self._gradients, strict=True))
        return same and self._settings == [_settings(group) for group in self.param_groups]

    def _capture(self, gradients: list[Tensor | None]) -> None:
        """Record a step without taking it."""
        device = self.param_groups[0]["params"][0].device
        given = [group["lr"] for group in self.param_groups]
        self._rates = [torch.tensor(float(rate), device=device) for rate in given]
        self._gradients = gradients
        self._settings = [_settings(group) for group in self.param_groups]
        graph = torch.cuda.CUDAGraph()
        try:
            for group, rate in zip(self.param_groups, self._rates, strict=True):
                group["lr"] = rate
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.inner.step()
        finally:
            for group, rate in zip(self.param_groups, given, strict=True):
                group["lr"] = rate
        self._graph = graph

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's; the next step is its own, and the one after it captured anew."""
        self.inner.load_state_dict(state_dict)
        self._graph, self._warm = None, False

    def __repr__(self) -> str:
        return f"CapturedOptimizer({self.inner!r})"


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr")}
