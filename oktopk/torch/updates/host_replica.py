"""The ranks of a host as one replica: their gradients are made their mean, or are equal already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from oktopk.allreduce import GradientAllreduce
from oktopk.host_group import HostGroup
from oktopk.torch.gradients import dense_views
from oktopk.torch.interop import TensorMemory
from oktopk.torch.replica import Replica
from oktopk.torch.step_agreement import StepAgreement


class HostReplica(Replica):
    """The ranks of a host, which take the mean of their gradients.

    Args:
        parameters: laid out as at construction of the optimizer.
        reducer: in two levels.
        memory: of both.

    Memory and traffic: those of `GradientAllreduce.mean_in_host`, whose `gradient_buffer` is filled.
    """

    name = "host"

    def __init__(
        self, parameters: Sequence[Tensor], reducer: GradientAllreduce, memory: TensorMemory
    ) -> None:
        super().__init__(parameters)
        self._reducer, self._memory = reducer, memory
        self._host = _group(reducer).host
        self.several = self._host.size > 1
        self._views = dense_views(memory.tensor(reducer.gradient_buffer), parameters) if self.several else []
        self._agreement = StepAgreement(list, len(parameters))
        # within a step the versions of gradients that are in the buffer, by their ids
        self._left: dict[int, int] = {}

    @contextmanager
    def gradients(self) -> Iterator[str]:
        try:
            yield ""
        finally:
            self._left.clear()

    def refuse(self, problem: str, what: str, scaled: bool, steps: int) -> str:
        if problem and self.several:
            self._mean(bool(problem))
        return problem

    @torch.no_grad()
    def take_mean(self) -> bool:
        """As the base class; one that is missing on this rank counts as zero where another rank has it."""
        return not self.several or self._mean(problem=False)

    def in_buffer(self, gradient: Tensor) -> bool:
        return id(gradient) in self._left and self._left[id(gradient)] == gradient._version

    def buffer_changed(self) -> None:
        self._left.clear()

    def _mean(self, problem: bool) -> bool:
        """Make each `p.grad` the host's mean where any rank of the host has one. Collective in the host.

        Returns:
            Whether no rank of the host has a problem, for which gradients stay as they are.
        """
        gradients = [None if problem else parameter.grad for parameter in self.tensors]
        token = self._agreement.tell(bytes(gradient is not None for gradient in gradients))
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
        _copy([(view, one) for view, one in zip(self._views, gradients, strict=True) if one is not None])
        with self._memory.stream_scope():
            tokens = self._reducer.mean_in_host(problem, token)
        if tokens is None:
            return False
        anywhere = self._agreement.hear(tokens, self._host)
        for parameter, used in zip(self.tensors, anywhere, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        pairs = zip(self.tensors, self._views, strict=True)
        _copy([(parameter.grad, view) for parameter, view in pairs if parameter.grad is not None])
        # one of another type than its parameter is rounded otherwise than what is read of the buffer
        left = ((p.grad, p.dtype) for p in self.tensors)
        self._left = {
            id(grad): grad._version
            for grad, dtype in left
            if grad is not None and grad.dtype == dtype and not grad.is_inference()
        }
        return True


class SummedReplica(Replica):
    """The ranks of a host, whose gradients are equal before the step, as a DistributedDataParallel over them makes them.

    Args:
        parameters: as the base class.
        reducer: in two levels.
    """

    name = "summed"

    def __init__(self, parameters: Sequence[Tensor], reducer: GradientAllreduce) -> None:
        super().__init__(parameters)
        self._reducer = reducer
        self.averaged = _group(reducer).host.size

    @torch.no_grad()
    def unequal(self, problem: str) -> str:
        """Why gradients are not equal, in a sentence; `problem` if they are. Collective in the host.

        Compares the norms of the gradients, where all are finite and no rank of the host has a problem; a GPU is waited for.

        Raises:
            MissingRanksError: ranks of the host did not come within `Settings.timeout`.

        Traffic: a control allgather of two int64 in the host.
        """
        reducer, group = self._reducer, _group(self._reducer)
        gradients = [] if problem else [p.grad for p in self.tensors if p.grad is not None]
        total = float(torch.stack(torch._foreach_norm(gradients)).double().sum()) if gradients else 0.0
        group.expect_all(f"step {reducer.steps}", reducer.settings.timeout, reducer.advice)
        own = np.array([bool(problem), np.float64(total).view(np.int64)], np.int64)
        problems, sums = group.host.allgather_control(own).T
        group.expect_none()
        comparable = not problems.any() and np.isfinite(sums.view(np.float64)).all()
        if comparable and len(set(sums.tolist())) > 1:
            return (
                "replica='summed' needs equal gradients on the ranks of a host, and their norms differ: take replica='host', "
                "or a DistributedDataParallel over the ranks of each host"
            )
        return problem


def _group(reducer: GradientAllreduce) -> HostGroup:
    group = reducer.group
    assert isinstance(group, HostGroup)
    return group


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor the second one."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
