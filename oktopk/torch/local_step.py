"""A replica's own step: the wrapped optimizer on its gradient, with the betas, rate and decay that the exchange asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

LEAST_BETA2 = 0.998
"""Of Adam's second moments of a replica that is not the only one."""

BETA1_POWER = 7
"""0.9 becomes 0.48."""

ADAM_SHARE = 0.05
"""The most of its residual in a replica's own parameters, with Adam's kind and each step exchanged."""

SHARED_BY = 4
"""Replicas up to which ADAM_SHARE holds, and each keeps its second moments to itself. With more the
share falls as one over the root of their number, and second moments are averaged."""


class LocalStep:
    """Takes steps of the wrapped optimizer on a replica's own gradient. Its groups are the user's before and after.

    Args:
        inner: the wrapped optimizer.
        replicas: P, one over the sum of squares of the replicas' shares.
        averages: the residual averages, as of `betas_of_replica`.
    """

    def __init__(self, inner: torch.optim.Optimizer, replicas: float, averages: bool) -> None:
        self._inner = inner
        self._replicas, self._averages = replicas, averages
        # RAdam would take a longer warm-up from a longer beta2
        self._least = 0.0 if isinstance(inner, torch.optim.RAdam) else LEAST_BETA2
        self.begin_window()

    def begin_window(self) -> None:
        """Nothing has decayed since the last exchange."""
        self._factors = [1.0] * len(self._inner.param_groups)

    @property
    def factors(self) -> list[float]:
        """float[groups]: the decay that is due in the next exchange, of the groups as they are now."""
        groups = len(self._inner.param_groups)  # a user may have made others of them
        return (self._factors + [1.0] * (groups - len(self._factors)))[:groups]

    @factors.setter
    def factors(self, factors: Sequence[float]) -> None:
        self._factors = list(factors)

    def take(self, scale: float, step: Callable[[], None]) -> None:
        """Take one step: Adam's kind with a replica's betas, and decoupled decay left to the exchange.

        Args:
            scale: of the learning rates.
            step: the optimizer's.
        """
        groups = self._inner.param_groups
        kept: list[dict[str, Any]] = [
            {name: group[name] for name in ("betas", "weight_decay") if name in group} for group in groups
        ]
        adaptive = is_adaptive(self._inner)
        try:
            for group in groups:
                if decays(self._inner, group):
                    group["weight_decay"] = 0.0
                if adaptive and "betas" in group:
                    group["betas"] = betas_of_replica(
                        group["betas"], self._replicas, self._averages, self._least
                    )
            with nullcontext() if scale == 1.0 else _scaled_rates(groups, scale):
                step()
        finally:
            for group, before in zip(self._inner.param_groups, kept, strict=True):
                group.update(before)

    def count_decay(self) -> None:
        """Add this step to the decay that is due in the next exchange, whether this replica has stepped or not."""
        factors = self.factors
        for number, group in enumerate(self._inner.param_groups):
            if decays(self._inner, group):
                factors[number] *= 1.0 - float(group["lr"]) * group["weight_decay"]
        self._factors = factors

    def decay_of(self, parameters: Sequence[Tensor], anywhere: bytes) -> list[float] | None:
        """By which factor each parameter decays since the last exchange; None where none does; equal on all ranks.

        Args:
            parameters: as the optimizer has them.
            anywhere: bool[parameters], those with a gradient on some rank.
        """
        if all(factor == 1.0 for factor in self._factors):
            return None
        factors: dict[int, float] = {}
        for group, factor in zip(self._inner.param_groups, self._factors, strict=True):
            factors |= dict.fromkeys(map(id, group["params"]), factor)
        every = list(map(factors.get, map(id, parameters), repeat(1.0)))
        if all(anywhere):
            return every
        return [factor if used else 1.0 for factor, used in zip(every, anywhere, strict=True)]

    def may_have_moved(self, parameters: Sequence[Tensor], anywhere: bytes) -> Iterator[bool]:
        """Of each parameter, whether the last step may have moved it on some rank: its rate is not 0, as far as the host knows.

        Args:
            parameters, anywhere: as of `decay_of`.
        """
        resting = [group for group in self._inner.param_groups if is_zero(group.get("lr"))]
        still = {id(parameter) for group in resting for parameter in group["params"]}
        return (bool(used) and id(each) not in still for used, each in zip(anywhere, parameters, strict=True))


def betas_of_replica(
    betas: Sequence[float], replicas: float, averages: bool, least: float
) -> tuple[float, float]:
    """Adam's betas for a replica that steps on gradients of its own; as they are where it is the only one.

    - beta2^(1/P), so that a second moment averages over as many batches as in a dense step, and at least `least`. Longer was
      better with P = 4; 0.995 and 0.998 were a tie.
    - beta1^7 where the residual averages in place of momentum: an entry waits until the sum of its
      updates is among the largest, some hundred steps at a density of 1 %. With momentum beside that
      a replica goes too far. With every = 2 a shorter beta1 gained nothing.

    Args:
        betas: of the dense step.
        replicas: P, one over the sum of squares of the replicas' shares.
        averages: the share is below 1, and each step is exchanged.
        least: of the second beta.

    Source: own, docs/results/updates.md.
    """
    first, second = float(betas[0]), float(betas[1])
    if replicas == 1:
        return first, second
    return first**BETA1_POWER if averages else first, max(second ** (1 / replicas), least)


def most_share(replicas: float) -> float:
    """The largest default of `local_share` for Adam's kind, where each step is exchanged.

    A share lets a replica see what it has not sent, so that it does not overshoot; and it moves the
    replica by its own noise, which grows as the root of P. With `union` at 1.25 % 0.05 was best with
    P = 4, and 0.02 with P = 16. At 6.25 % with P = 16 0.05 was better than 0.02, by `union`; Ok-Topk
    ran with 0.02 alone.

    Args:
        replicas: P, as for `betas_of_replica`.

    Source: own, docs/results/updates.md.
    """
    return ADAM_SHARE * min(1.0, (SHARED_BY / replicas) ** 0.5)


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer divides by second moments as torch's Adam does."""
    # before torch 2.7 AdamW is no Adam
    kinds = torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam
    return isinstance(optimizer, kinds)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something reads or writes parameters before or after each of an optimizer's steps."""
    return any(
        (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
        )
    )


def is_zero(rate: object) -> bool:
    """Whether a learning rate is zero; not asked of a GPU, which would have to be waited for."""
    if isinstance(rate, Tensor):
        return not rate.is_cuda and rate.numel() == 1 and float(rate) == 0.0
    return isinstance(rate, Real) and rate == 0


def may_only_set_up(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step begins by asking all ranks if it only sets up the optimizer's state; equal on all ranks."""
    return not optimizer.state and all(is_zero(group.get("lr")) for group in optimizer.param_groups)


def decays(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group has decoupled weight decay: its parameters times 1 - lr · weight_decay in each step."""
    muon = getattr(torch.optim, "Muon", ())
    decoupled = group.get("decoupled_weight_decay") or isinstance(optimizer, (torch.optim.AdamW, muon))
    return bool(decoupled and group.get("weight_decay"))


@contextmanager
def _scaled_rates(groups: Sequence[dict[str, Any]], scale: float) -> Iterator[None]:
    """Within, the learning rate of each group is times `scale`; one in a tensor, which groups may share, keeps its address."""
    groups = [group for group in groups if group.get("lr") is not None]
    before = [group["lr"] for group in groups]
    tensors = {id(rate): rate for rate in before if isinstance(rate, Tensor)}
    values = {key: rate.clone() for key, rate in tensors.items()}
    scaled = before
    try:
        for rate in tensors.values():
            rate.mul_(scale)
        for group in groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"] * scale
        scaled = [group["lr"] for group in groups]
        yield
    finally:
        for key, rate in tensors.items():
            rate.copy_(values[key])
        for group, was, now in zip(groups, before, scaled, strict=True):
            if group["lr"] is now:  # else a hook of the optimizer has set another
                group["lr"] = was
