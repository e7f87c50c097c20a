"""Adam as BERT was trained with."""

from __future__ import annotations

from typing import Any

import torch

LONG_AGO = 2.0**60
"""A step count at which torch's bias corrections are 1, and which counting on leaves as it is."""


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
