"""Accelerate with a `DistributedOptimizer`: agree(accelerator, model, optimizer)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from oktopk.frameworks import imported
from oktopk.frameworks.agreement import Agreement

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
else:
    AcceleratedOptimizer = imported("accelerate.optimizer", "accelerate").AcceleratedOptimizer


def agree(accelerator: Any, *prepared: Any) -> None:
    """Let Accelerate evaluate and save what all ranks agree on, and go on from every rank's optimizer.

    A forward pass in eval mode without gradients, `accelerator.save_state`, `save_model` and `get_state_dict` have the
    parameters of `DistributedOptimizer.agreed`. `save_state` also writes each rank's optimizers, as `oktopk-RANK.pt`, and
    `load_state` goes on from there on any number of ranks, see `oktopk.elastic.redistribute`. A DistributedDataParallel has its
    own sums switched off. Optimizers that are no `DistributedOptimizer` are left alone.

    Where each rank is a process alone to Accelerate, as under mpiexec, each needs a folder of its own, and goes on from that, on
    as many ranks.

    Args:
        accelerator: the Accelerator.
        prepared: what `accelerator.prepare` returned: all models and optimizers, in one call.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: a model or an optimizer is missing or was not prepared, the optimizer sums over other ranks than Accelerate's,
            or is of shards of a model, or the DistributedDataParallel has another hook; in `load_state`, only some ranks find
            their files; on every rank alike.

    Example:
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> agree(accelerator, model, optimizer)
    """
    models = [accelerator.unwrap_model(each) for each in prepared if isinstance(each, nn.Module)]
    optimizers = [each for each in prepared if isinstance(each, AcceleratedOptimizer)]
    if not (models and optimizers):
        raise ValueError("agree() takes the model and the optimizer that accelerator.prepare() returned")
    agreement = Agreement(optimizers, accelerator.num_processes)
    agreement.watch(*models)
    kept = weakref.ref(agreement)  # by the hooks of the model, which Accelerate may be told to forget

    def save(models: Any, weights: Any, folder: str) -> None:
        if (agreement := kept()) is not None:
            agreement.save(folder)

    def load(models: Any, folder: str) -> None:
        if (agreement := kept()) is not None:
            agreement.expect_from(folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
