"""Builds the torch optimizer of a run, and computes its learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from jobs.config.sections import OptimizerConfig, ScheduleConfig
from oktopk.torch.wrapped import WrappedOptimizer

LONG_AGO = 2.0**60
"""A step count at which torch's bias corrections are 1, and which counting on leaves as it is."""


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    *,
    fused: bool = False,
    captured: bool = False,
) -> torch.optim.Optimizer:
    """The torch optimizer that applies the reduced gradient.

    Args:
        config: of a run.
        parameters: where they are to stay.
        fused: in one kernel.
        captured: and that replayed as a CUDA graph.
    """
    groups = _groups(config, parameters)
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused or None}
    made: torch.optim.Optimizer
    if config.name == "sgd":
        made = torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    else:
        kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        kind = kinds[config.name] if config.bias_correction else UncorrectedAdam
        betas = config.beta1, config.beta2
        made = kind(groups, betas=betas, eps=config.eps, capturable=captured, **common)
    return CapturedOptimizer(made) if captured else made


def _groups(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    every = list(parameters)
    if config.decay_vectors:
        return [{"params": every}]
    matrices = {"params": [p for p in every if p.ndim > 1]}
    vectors = {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]


class UncorrectedAdam(torch.optim.AdamW):
    """Adam without bias correction, with decoupled weight decay.

    p <- (1 - lr wd) p - lr m / (sqrt(v) + eps), m and v being the running means of the gradient and of its square, from
    zero. It is torch's, told that it began long ago.

    Args:
        As torch.optim.AdamW.

    Source: Devlin et al., NAACL 2019, and their published optimizer.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's; the state is there from the start."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            self.state[parameter] = {
                "step": torch.tensor(LONG_AGO, device=parameter.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


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

    def _load(self, state: dict[str, Any]) -> None:
        """As the wrapped optimizer; the next step is its own, and the one after it captured anew."""
        super()._load(state)
        self._graph, self._warm = None, False

    def __repr__(self) -> str:
        return f"CapturedOptimizer({self.inner!r})"


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def learning_rate_factor(
    schedule: ScheduleConfig, step: int, *, steps: int, steps_per_epoch: int, ranks: int
) -> float:
    """The factor on optimizer.lr in a step.

    Args:
        schedule: its `warmup` and `milestones` count in `schedule.unit`.
        step: 0 for the first.
        steps: length of the run.
        steps_per_epoch: length of an epoch, on any rank.
        ranks: comm.size, for a warm-up that starts at 1/ranks.

    Returns:
        A factor in [0, 1]. A warm-up reaches 1 with its last step.
    """
    scale = {"steps": 1, "epochs": steps_per_epoch, "run": steps}[schedule.unit]
    warmup = schedule.warmup * scale
    if step < warmup:
        start = 1.0 / ranks if isinstance(schedule.warmup_start, str) else schedule.warmup_start
        risen = min(1.0, (step + 1) / warmup)
        if schedule.name == "one-cycle":
            risen = 0.5 * (1.0 - math.cos(math.pi * risen))
        return start + (1.0 - start) * risen
    if schedule.name == "step":
        passed = sum(step >= milestone * scale for milestone in schedule.milestones)
        return float(schedule.gamma**passed)
    if schedule.name == "exponential":
        return float(schedule.gamma ** (step // scale))
    # The last step gets `final` itself; a decay of a single step stays at 1.
    progress = min(1.0, (step - warmup) / max(1.0, steps - 1 - warmup))
    if schedule.name in ("cosine", "one-cycle"):
        return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.name == "linear":
        return 1.0 - (1.0 - schedule.final) * progress
    return 1.0
