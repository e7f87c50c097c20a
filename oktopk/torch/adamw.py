"""AdamW whose step a `DistributedOptimizer` takes in the pass that selects."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, TypeGuard
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.allreduce import GradientAllreduce
from oktopk.displacement import ADAMW_TERMS, AdamWDisplacement, adamw_terms
from oktopk.torch.as_wrapped import AsWrapped, gradient_of
from oktopk.torch.interop import TYPE_NAMES
from oktopk.torch.local_step import has_step_hooks

_MOMENTS = ("exp_avg", "exp_avg_sq")
# of gradients; one that was assigned to a parameter is on its device
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
    optimizer's step, with `every` > 1, with hosts as replicas, with sharded parameters,
    and where gradients or moments are of another type than their parameters or laid out otherwise. Where a
    step is taken so, each `step` of the state becomes an element of one vector.

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
        if selecting is None or not selecting.has_state:
            is_complex = super()._init_group(group, *lists, **named)
        if selecting is not None:
            for each in (*lists, *named.values()):
                if isinstance(each, list):
                    each.clear()
        return is_complex


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
        has_state: whether all parameters that have gradients have moments, as of the last `look`.
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
        # the numbers of the parameters that have gradients, as the reducer has them, as a list and as an array
        self._used: list[int] = []
        self._at = np.zeros(0, np.int64)
        self._pointers: list[list[int]] = []  # where gradients and moments lie
        self._addresses = np.zeros((3, len(parameters)), np.int64)
        self._terms = np.zeros((len(parameters), len(ADAMW_TERMS)), np.float32)
        self._vector = torch.zeros(0, dtype=torch.float32)  # the steps of all parameters
        self._views = list[Tensor]()  # of its elements
        self._version = -1  # of the vector, when it held `_counts`
        self._counts = np.zeros(len(parameters), np.int64)
        self.forget()

    def look(self) -> None:
        """Look where gradients and moments lie, for `run`. Values may change until then, but not where they lie."""
        self._fits = self._look()
        if self._fits and self.has_state:
            self._address()

    def forget(self) -> None:
        """Let go of what `look` has found."""
        self._fits = self.has_state = False
        self._sizes: list[int] = []  # of each group, parameters that have gradients
        self._states: list[dict[str, Any]] = []  # of these parameters
        # how what was read lay, and the moments, when they last fitted
        self._laid: list[list[Any]] = []
        self._moments: list[ref[Tensor]] = []

    def run(self) -> bool:
        """Step, if the step can be taken: moments change, and the residual, when the reducer steps. Returns whether it can."""
        optimizer = self._optimizer
        if not (self._fits and self._is_plain()):
            return False
        optimizer._selecting = self
        try:
            optimizer.step()  # which makes state where there is none
        finally:
            optimizer._selecting = None
        if not self.has_state:
            self._look()
            self._address()
        self._set_step()
        self._fits, self._states = False, []  # which would keep moments that are replaced
        return True

    def _address(self) -> None:
        """Note where what was looked at lies, for the displacement."""
        self._addresses[:] = 0
        self._addresses[:, self._at] = self._pointers

    def _set_step(self) -> None:
        """Count the step, and tell the displacement what it reads."""
        counts, end = self._count(), 0
        for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
            begin, end = end, end + size
            rate, betas, eps = float(group["lr"]), group["betas"], group["eps"]
            betas = float(betas[0]), float(betas[1])
            here, at = counts[begin:end], self._at[begin:end]
            for count in set(here.tolist()):
                self._terms[at[here == count]] = adamw_terms(rate, betas, eps, count)
        self.displacement.set_step(self._addresses, self._terms)

    def _count(self) -> NDArray[np.int64]:
        """Count a step of the parameters that have gradients. Returns their counts.

        What counts them becomes a view of one vector, so that one addition counts all. Waits for a GPU where a count is new, was
        replaced or was written to.
        """
        steps = [state["step"] for state in self._states]
        vector = self._vector
        kind = steps[0] if steps else vector
        if not self._views or (kind.dtype, kind.device) != (vector.dtype, vector.device):
            self._vector = vector = kind.new_zeros(len(self._counts))
            self._views, self._version = [vector[number] for number in range(len(vector))], -1
        views, size, first = self._views, vector.element_size(), vector.data_ptr()
        places = [first + number * size for number in self._used]
        same = all(map(operator.is_, steps, [views[number] for number in self._used]))
        if not same or list(map(Tensor.data_ptr, steps)) != places:
            counts = [step.detach().reshape(()).to(vector) for step in steps]
            vector[torch.from_numpy(self._at)] = torch.stack(counts)
            for state, number in zip(self._states, self._used, strict=True):
                state["step"] = views[number] = vector[number]
        if vector._version != self._version:
            self._counts[:] = vector.tolist()
        if len(steps) == len(vector):
            vector.add_(1)
        elif steps:
            torch._foreach_add_([views[number] for number in self._used], vector.new_ones(()), alpha=1.0)
        self._version = vector._version
        self._counts[self._at] += 1
        return self._counts[self._at]

    def _is_plain(self) -> bool:
        """Whether the pass computes this step, and no hook reads the parameters behind it."""
        groups = self._optimizer.param_groups
        others = any(group.get(name) for group in groups for name in _OTHER_STEPS)
        decays = any(group["weight_decay"] for group in groups)  # here, and not in the exchange
        return not (has_step_hooks(self._optimizer) or others or decays or self._as_wrapped.relaid)

    def _look(self) -> bool:
        """Whether gradients and moments are of the parameters' type, and laid out as they, as they are now."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        used = [[p for p in group["params"] if p.grad is not None] for group in groups]
        self._sizes, parameters = list(map(len, used)), list(chain.from_iterable(used))
        numbers = list(map(self._numbers.get, map(id, parameters), repeat(-1)))
        gradients: list[Any] = list(map(gradient_of, parameters))
        if len(state) == len(parameters) and all(map(operator.is_, state, parameters)):
            self._states = list(state.values())  # to look each up takes five times as long
        else:
            self._states = list(map(state.get, parameters, repeat({})))
        self.has_state = all(self._states)
        try:
            moments = [each[name] for name in _MOMENTS for each in self._states if each]
        except KeyError:  # torch says so
            return False
        lie = list(map(Tensor.data_ptr, moments))
        half = len(moments) // 2
        self._pointers = [list(map(Tensor.data_ptr, gradients)), lie[:half], lie[half:]]
        laid: list[list[Any]] = [numbers, lie, list(map(Tensor.stride, moments))]
        laid += [list(map(what, gradients)) for what in _LAYOUT]
        known = [each() for each in self._moments]
        same = len(moments) == len(known) and all(map(operator.is_, moments, known))
        if same and laid == self._laid:
            return True
        with_state = [number for number, each in zip(numbers, self._states, strict=True) if each]
        fits = self._as_wrapped.fits
        if -1 in numbers or not all(map(fits, numbers + 2 * with_state, gradients + moments)):
            return False
        self._laid, self._moments = laid, list(map(ref, moments))
        self._used, self._at = numbers, np.array(numbers, np.int64)
        return True


def takes_steps(optimizer: torch.optim.Optimizer) -> TypeGuard[AdamW]:
    """Whether an optimizer's steps may be taken by a `SelectingStep`: it is an `AdamW` that steps as torch's does."""
    plain = _function(type(optimizer).step) is _function(torch.optim.AdamW.step)
    return isinstance(optimizer, AdamW) and plain


def _function(step: Any) -> Any:
    """What torch's profiler has wrapped, where it has."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step
