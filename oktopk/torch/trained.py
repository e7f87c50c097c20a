"""Which parameters of an optimizer are reduced, in which order; and which it has got since then."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from oktopk.torch.overlap import in_models_order
from oktopk.torch.tables import sparse_tables


class TrainedParameters:
    """The parameters of an optimizer that need a gradient.

    Args:
        optimizer: to be wrapped.
        in_buckets: whether their order counts, as gradients are reduced in buckets.
        order: as of `DistributedOptimizer`.
        sparse: as of `DistributedOptimizer`.

    Attributes:
        all: each once, in the order in which they are reduced, equal on all ranks.
        order: their places among the optimizer's.
        lacking: how many of them the user's `order` lacks.
        named: those that have sparse gradients, as the user says, or as is found.
        tables: those of `all` with sparse gradients.
        dense: the others.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        in_buckets: bool,
        order: Iterable[Tensor] | None,
        sparse: Sequence[Tensor] | None,
    ) -> None:
        self._optimizer = optimizer
        self._owned = [p for group in optimizer.param_groups for p in group["params"]]
        self._frozen = [p for p in self._owned if not p.requires_grad]
        self.all = [p for p in self._owned if p.requires_grad]
        places = {id(p): place for place, p in enumerate(self.all)}
        used = self.all if order is None else list(order)
        self.lacking = len(set(places) - set(map(id, used)))
        if in_buckets and not self.lacking:
            if order is not None:
                self.all = [p for p in {id(p): p for p in used}.values() if id(p) in places]
            elif len(optimizer.param_groups) > 1:
                self.all = in_models_order(self.all)
        self.order = [places[id(p)] for p in self.all]
        self.named = sparse_tables(self.all) if sparse is None else list(sparse)
        numbers = set(map(id, self.named))
        self.tables = [p for p in self.all if id(p) in numbers]
        self.dense = [p for p in self.all if id(p) not in numbers]

    def unwrapped(self) -> str:
        """What of the optimizer needs a gradient now and did not at construction, in a sentence; "" if nothing does."""
        now = [p for group in self._optimizer.param_groups for p in group["params"]]
        if len(now) == len(self._owned) and all(map(operator.is_, now, self._owned)):
            unfrozen = [p for p in self._frozen if p.requires_grad]
        else:
            known = set(self.all)
            unfrozen = [p for p in now if p.requires_grad and p not in known]
        if not unfrozen:
            return ""
        shapes = ", ".join(str(tuple(p.shape)) for p in unfrozen[:3])
        return (
            f"{len(unfrozen)} parameter(s) of the optimizer, of shape {shapes}{', ...' if len(unfrozen) > 3 else ''}, need a "
            "gradient that is not reduced: they were frozen or missing when the optimizer was wrapped. Unfreeze and add "
            "parameters first, then wrap"
        )
