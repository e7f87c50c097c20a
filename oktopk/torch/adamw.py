"""AdamW whose step a `DistributedOptimizer` takes in the pass that selects."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from oktopk.allreduce import GradientAllreduce
from oktopk.displacement import ADAMW_TERMS, AdamWDisplacement, adamw_terms
from oktopk.torch.agreement import TYPE_NAMES
from oktopk.torch.as_wrapped import AsWrapped

_MOMENTS = ("exp_avg", "exp_avg_sq")
# a tensor that lies where it lay, and has as many elements of as many bytes, is on the same device
_LAYOUT = (Tensor.stride, Tensor.numel, operator.attrgetter("dtype"))
_OTHER_STEPS = ("amsgrad", "maximize", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step costs less memory traffic within a `DistributedOptimizer` that sends updates.

    Arguments, groups, state and results are those of torch's, and states load either way. Alone it is torch's. Where a
    `DistributedOptimizer` wraps it and sends updates, moments and residual are updated in the pass that selects:

        m, v := as torch's fused AdamW computes them
        residual := residual + lr / (1 - beta1^t) · m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        u := the largest sums of the largest entries of all residuals
        reference := decay · (reference - u / P)
        parameters := round(reference - local_share · residual)

    So parameters are written once a step, and not read. The residual takes what AdamW moves them by before it is rounded to what
    a parameter can hold: around torch's AdamW it takes the difference of parameters, which is rounded. Without selection both
    give the same, to rounding. On x86 with FMA m and v of float32 are those of torch's `fused=True`, bit for bit, but for up to
    15 elements at the end of a tensor.

    A step is torch's own, with torch's rounding, with amsgrad, maximize, capturable or differentiable, with hooks on the
    optimizer's step, with `every` > 1, with hosts as replicas, with sharded parameters, with tables that have sparse gradients,
    and where gradients or moments are of another type than their parameters or laid out otherwise.

    Args:
        params, lr, betas, eps, weight_decay, ...: as `torch.optim.AdamW`.

    Memory traffic: a step of n float32 parameters reads and writes 40n bytes, beside 4n for the norms of gradients and 4n where
        weights decay; around torch's AdamW 56n beside these.
    Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, ICLR 2019.

    Example:
        >>> optimizer = oktopk.torch.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = DistributedOptimizer(optimizer, density=0.01)
    """

    _selecting: SelectingStep | None = None  # what takes the step that runs

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> Any:
        """As torch's, which makes state where there is none; where the step is taken, torch's kernels get nothing to do."""
        selecting, is_complex = self._selecting, False
        if selecting is None or not selecting.has_state(group):
            is_complex = super()._init_group(group, *lists, **named)
        if selecting is not None:
            selecting.take(group)
            for each in (*lists, *named.values()):
                if isinstance(each, list):
                    each.clear()
        return is_complex


@dataclass
class _Taken:
    """What a step takes of a group: of the parameters that have gradients."""

    parameters: list[Tensor]
    states: list[dict[str, Any]]  # empty where torch has not made it yet
    numbers: list[int]  # of the parameters, as the reducer has them


class SelectingStep:
    """Steps of an `AdamW`, as what they move parameters by. Collective: every rank must construct.

    Args:
        optimizer: an `AdamW`.
        parameters: those that updates are sent of, as the reducer has them.
        reducer: in flat steps, of updates.
        as_wrapped: what the parameters were.

    Raises:
        ValueError: the device has no memory for it; on every rank alike.

    Attributes:
        displacement: of the step that was taken last, for the reducer's next one.
    """

    def __init__(
        self,
        optimizer: AdamW,
        parameters: Sequence[Tensor],
        reducer: GradientAllreduce,
        as_wrapped: AsWrapped,
    ) -> None:
        self._optimizer, self._as_wrapped = optimizer, as_wrapped
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        kind = TYPE_NAMES[parameters[0].dtype]
        self.displacement: AdamWDisplacement = reducer.adamw_displacement(
            [parameter.numel() for parameter in parameters], kind
        )
        self._taken: dict[int, _Taken] = {}  # by the group's id, as of the last `look`
        self._fitting: list[list[Any]] = []  # how what was read then lay
        self._fits = False
        # by a parameter's number the tensor that counts its steps, the version of that and what it holds
        self._counts: dict[int, tuple[Tensor, int, int]] = {}
        self._addresses = np.zeros((3, len(parameters)), np.int64)
        self._terms = np.zeros((len(parameters), len(ADAMW_TERMS)), np.float32)

    def look(self) -> None:
        """Look where gradients and moments lie, for `run`. Values may change until then, but not where they lie."""
        self._fits = self._look()

    def forget(self) -> None:
        """Let go of what `look` has found, where the step is not taken."""
        self._fits, self._taken = False, {}

    def run(self) -> bool:
        """Step, if the step can be taken: moments change, and the residual, when the reducer steps. Returns whether it can."""
        optimizer = self._optimizer
        if not (self._fits and self._is_plain()):
            return False
        self._addresses[:] = 0
        optimizer._selecting = self
        try:
            optimizer.step()
        finally:
            optimizer._selecting, self._taken = None, {}
        self.displacement.set_step(self._addresses, self._terms)
        return True

    def has_state(self, group: dict[str, Any]) -> bool:
        """Whether all parameters of a group that have gradients have moments."""
        return all(self._taken[id(group)].states)

    def take(self, group: dict[str, Any]) -> None:
        """Take a group's step, where `run` has found that it can be taken."""
        taken, state = self._taken[id(group)], self._optimizer.state
        if not taken.numbers:
            return
        states = taken.states if all(taken.states) else [state[parameter] for parameter in taken.parameters]
        counts = self._count(taken.numbers, [each["step"] for each in states])
        numbers = np.array(taken.numbers)
        gradients = [gradient for parameter in taken.parameters if (gradient := parameter.grad) is not None]
        read = gradients, *([each[name] for each in states] for name in _MOMENTS)
        self._addresses[:, numbers] = [list(map(Tensor.data_ptr, tensors)) for tensors in read]
        rate, betas, eps = float(group["lr"]), group["betas"], group["eps"]
        betas = float(betas[0]), float(betas[1])
        for count in set(counts):
            self._terms[numbers[np.equal(counts, count)]] = adamw_terms(rate, betas, eps, count)

    def _count(self, numbers: list[int], steps: list[Tensor]) -> list[int]:
        """Count a step of these parameters. Returns their counts; waits for a GPU only for one that is not known."""
        counts = []
        for number, step in zip(numbers, steps, strict=True):
            held, version, count = self._counts.get(number, (None, 0, 0))
            known = held is step and version == step._version
            counts.append((count if known else int(step)) + 1)
        # of a number torch makes a tensor for each addend on a CPU
        if steps[0].is_cpu:
            torch._foreach_add_(steps, torch.ones(()), alpha=1.0)
        else:
            torch._foreach_add_(steps, 1)
        for number, step, count in zip(numbers, steps, counts, strict=True):
            self._counts[number] = step, step._version, count
        return counts

    def _is_plain(self) -> bool:
        """Whether the pass computes this step, and no hook reads the parameters behind it."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        hooks = (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
        others = any(group.get(name) for group in groups for name in _OTHER_STEPS)
        decays = any(group["weight_decay"] for group in groups)  # here, and not in the exchange
        return not (any(hooks) or others or decays or self._as_wrapped.relaid)

    def _look(self) -> bool:
        """Whether gradients and moments are of the parameters' type, and laid out as they, as they are now."""
        state, self._taken = self._optimizer.state, {}
        gradients: list[Tensor] = []
        states: list[dict[str, Any]] = []
        numbers: list[int] = []
        for group in self._optimizer.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            taken = _Taken(
                used, [state.get(p, {}) for p in used], [self._numbers.get(id(p), -1) for p in used]
            )
            self._taken[id(group)] = taken
            gradients += [parameter.grad for parameter in used]
            states += taken.states
            numbers += taken.numbers
        with_state = [number for number, held in zip(numbers, states, strict=True) if held]
        try:
            moments = [held[name] for name in _MOMENTS for held in states if held]
        except KeyError:  # torch says so
            return False
        now = [numbers, *(list(map(what, gradients)) for what in _LAYOUT)]
        now += [with_state, *(list(map(what, moments)) for what in (Tensor.data_ptr, *_LAYOUT))]
        if now == self._fitting:
            return True
        fits = self._as_wrapped.fits
        if -1 in numbers or not all(map(fits, numbers + len(_MOMENTS) * with_state, gradients + moments)):
            return False
        self._fitting = now
        return True


def takes_steps(optimizer: torch.optim.Optimizer) -> TypeGuard[AdamW]:
    """Whether an optimizer's steps may be taken by a `SelectingStep`: it is an `AdamW` that steps as torch's does."""
    plain = _function(type(optimizer).step) is _function(torch.optim.AdamW.step)
    return isinstance(optimizer, AdamW) and plain


def _function(step: Any) -> Any:
    """What torch's profiler has wrapped, where it has."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step
