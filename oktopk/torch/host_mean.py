"""The gradients of the ranks of a host: made their mean, or compared where they should be equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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


@torch.no_grad()
def unequal_in_host(parameters: Sequence[Tensor], reducer: GradientAllreduce, problem: str) -> str:
    """Why the ranks of this host may not count as one, in a sentence; "" if they may. Collective in the host.

    Compares the norms of their gradients, where all are finite; a GPU is waited for.

    Args:
        parameters: whose `p.grad` are compared.
        reducer: in two levels.
        problem: of this rank, which is then returned; no rank of its host compares.

    Raises:
        MissingRanksError: ranks of the host did not come within `Settings.timeout`.

    Traffic: a control allgather of two int64 in the host.
    """
    group = reducer.group
    assert group is not None
    gradients = [] if problem else [p.grad for p in parameters if p.grad is not None]
    total = float(torch.stack(torch._foreach_norm(gradients)).double().sum()) if gradients else 0.0
    group.expect_all(f"step {reducer.steps}", reducer.settings.timeout, reducer.advice)
    mine = np.array([bool(problem), np.float64(total).view(np.int64)], np.int64)
    problems, sums = group.host.allgather_control(mine).T
    group.expect_none()
    comparable = not problems.any() and np.isfinite(sums.view(np.float64)).all()
    if comparable and len(set(sums.tolist())) > 1:
        return (
            "replica='summed' needs equal gradients on the ranks of a host, and their norms differ: take replica='host', or a "
            "DistributedDataParallel over the ranks of each host"
        )
    return problem


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor the second one."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)
