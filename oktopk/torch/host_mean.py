"""The gradients of the parameters of all ranks of a host, made their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.allreduce import GradientAllreduce
from oktopk.torch.gradients import dense_views
from oktopk.torch.interop import TensorMemory
from oktopk.torch.step_agreement import StepAgreement


class HostMean:
    """Makes the gradients of a host's ranks their mean.

    Args:
        parameters: laid out as at construction of the optimizer.
        reducer: in two levels.
        memory: of both.

    Memory and traffic: those of `GradientAllreduce.mean_in_host`, whose `gradient_buffer` is filled.
    """

    def __init__(
        self, parameters: Sequence[Tensor], reducer: GradientAllreduce, memory: TensorMemory
    ) -> None:
        self._parameters, self._reducer, self._memory = parameters, reducer, memory
        assert reducer.group is not None
        self._host = reducer.group.host
        self._views = dense_views(memory.tensor(reducer.gradient_buffer), parameters)
        self._agreement = StepAgreement(list, len(parameters))

    @torch.no_grad()
    def take(self, problem: bool) -> bool:
        """Make each `p.grad` the host's mean where any rank of the host has one; one that is missing counts as zero.

        Collective: every rank of the host must call. Where one has a problem, gradients stay as they are.

        Returns:
            Whether no rank of the host has a problem.
        """
        gradients = [None if problem else parameter.grad for parameter in self._parameters]
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
        for parameter, used in zip(self._parameters, anywhere, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        held = zip(self._parameters, self._views, strict=True)
        _copy([(parameter.grad, view) for parameter, view in held if parameter.grad is not None])
        return True


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor the second one."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
