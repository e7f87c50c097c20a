"""Algorithm 2 around any torch optimizer: momentum, weight decay and Adam act on the reduced average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from oktopk.gradient_allreduce import GradientAllreduce
from oktopk.report import StepReport


class DistributedOptimizer(torch.optim.Optimizer):
    """Reduces the gradients of all ranks, then lets the wrapped optimizer step on the average.

    The gradients of all parameters live in one flat buffer, of which each `p.grad` is a view. A parameter without a gradient in
    a step counts as zero. Learning-rate schedulers take either this optimizer or the wrapped one.

    Args:
        optimizer: the torch optimizer that owns the parameters; float32 on the CPU.
        comm: intracommunicator. Collective: every rank must construct, with the same model and settings.
        method: a name in `oktopk.METHODS`.
        settings: keywords of `oktopk.Settings`.

    Raises:
        ValueError: a parameter is not float32 on the CPU, none needs a gradient, a setting is out of range, ranks disagree, or
            momentum correction meets an optimizer with momentum of its own; on every rank alike.

    Traffic: that of the method, once a step.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.

    Example:
        >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), MPI.COMM_WORLD, density=0.01)
        >>> optimizer.zero_grad()
        >>> loss(model(x), y).backward()
        >>> report = optimizer.step()
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, comm: MPI.Intracomm, method: str = "oktopk", **settings: Any
    ) -> None:
        # the base class is not initialised: groups, state and defaults are those of the wrapped optimizer
        self.inner = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.length = sum(p.numel() for p in self._parameters)
        problem = _problem(optimizer, self._parameters, settings)
        self.reducer = GradientAllreduce(comm, self.length, method, problem=problem, **settings)
        self._flat = torch.zeros(self.length)
        self._gradients = _views(self._flat, self._parameters)
        self._update = torch.from_numpy(self.reducer.update)
        self._updates = _views(self._update, self._parameters)
        self._attach()

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

    @property
    def gradient(self) -> NDArray[np.float32]:
        """float32[n]: this rank's flat gradient, as the last step took it; valid until the next backward pass."""
        return self._flat.numpy()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero all gradients in place; they are views of one buffer, so `set_to_none` makes no difference."""
        self._flat.zero_()
        self._attach()

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, measure: bool = False
    ) -> StepReport:
        """Reduce the gradients and step. Collective: every rank must call.

        Args:
            closure: computes the gradients first, if given.
            measure: take the paper's measures of this step, see `GradientAllreduce.step`.

        Returns:
            What was selected, sent and timed. A skipped step leaves parameters and optimizer state untouched.

        Raises:
            NonFiniteGradientError: on every rank alike, if settings say so; nothing was stepped.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._collect()
        report = self.reducer.step(self._flat.numpy(), measure=measure)
        if not report.skipped:
            for parameter, update in zip(self._parameters, self._updates, strict=True):
                parameter.grad = update
            version = self._update._version
            try:
                self.inner.step()
            finally:
                self._attach()
                if self._update._version != version:  # some optimizers work in place on p.grad
                    self.reducer.forget_support()
        return report

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the flat gradient is laid out at construction.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "parameters cannot be added to a DistributedOptimizer: wrap the optimizer that has them all"
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer and of this rank's reducer: tensors and plain values only."""
        return {"optimizer": self.inner.state_dict(), "reducer": _to_tensors(self.reducer.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where this rank's `state_dict` was taken, bit for bit.

        Raises:
            ValueError: the state is of another length or method.
        """
        self.reducer.load_state_dict(_to_arrays(state_dict["reducer"]))
        self.inner.load_state_dict(state_dict["optimizer"])

    def close(self) -> None:
        """Free what MPI holds. Collective."""
        self.reducer.close()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.inner!r}, method={self.reducer.method!r}, length={self.length})"

    def _attach(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _collect(self) -> None:
        """Bring gradients that autograd or the user put elsewhere into the flat buffer."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                if parameter.grad.is_sparse:
                    raise TypeError("a gradient is sparse; build the embedding with sparse=False")
                gradient.copy_(parameter.grad)


def _views(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive pieces of a flat tensor, in the shapes of `like`."""
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
    return views


def _problem(optimizer: torch.optim.Optimizer, parameters: list[Tensor], settings: dict[str, Any]) -> str:
    """What keeps this optimizer from being wrapped, in a sentence; "" if nothing does."""
    if not parameters:
        return "no parameter of the optimizer needs a gradient"
    for parameter in parameters:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return f"a parameter is {parameter.dtype} on {parameter.device}, not torch.float32 on cpu"
    correction = settings.get("momentum_correction")
    if correction and any(_momentum(group) for group in optimizer.param_groups):
        return f"momentum_correction {correction} needs an optimizer without momentum of its own"
    return ""


def _momentum(group: dict[str, Any]) -> bool:
    return bool(group.get("momentum") or group.get("betas"))


def _to_tensors(state: Any) -> Any:
    """Arrays become tensors, which torch.load reads with weights_only."""
    if isinstance(state, dict):
        return {name: _to_tensors(value) for name, value in state.items()}
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def _to_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _to_arrays(value) for name, value in state.items()}
    return state.numpy() if isinstance(state, Tensor) else state
