"""Adam as BERT was trained with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class UncorrectedAdam(torch.optim.AdamW):
    """Adam without bias correction, with decoupled weight decay.

    p <- (1 - lr wd) p - lr m / (sqrt(v) + eps), m and v being the running means of the gradient and of its square, from
    zero. torch's kernels do the work: what they correct is taken out of the rate, eps and the decay that they are given.

    Args:
        As torch.optim.AdamW.

    Source: Devlin et al., NAACL 2019, and their published optimizer.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; every parameter that has a gradient in one step needs one in all."""
        given = [(group["lr"], group["eps"], group["weight_decay"]) for group in self.param_groups]
        for group, (lr, eps, decay) in zip(self.param_groups, given, strict=True):
            group["steps"] = group.get("steps", 0) + 1
            beta1, beta2 = group["betas"]
            spread = math.sqrt(1.0 - beta2 ** group["steps"])
            faster = (1.0 - beta1 ** group["steps"]) / spread
            group["lr"], group["eps"], group["weight_decay"] = lr * faster, eps / spread, decay / faster
        try:
            return super().step(closure)
        finally:
            for group, (lr, eps, decay) in zip(self.param_groups, given, strict=True):
                group["lr"], group["eps"], group["weight_decay"] = lr, eps, decay
