"""Updates in place of gradients: the optimizer steps first, then the replicas exchange what it has changed (docs/adamw.md).

| file | what |
|---|---|
| optimizer.py | `UpdatesOptimizer`, a step from the gradient to the parameters; state.py is what it saves |
| reference_parameters.py | the parameters that all ranks agree on, and what was written into them |
| gradient_check.py, gradient_norms.py | whether a step may begin, and clipping |
| window.py | the steps between two exchanges |
| replica_residual.py, residual_decay.py, local_share.py | what is not sent, how it is forgotten, and how much of it a rank sees |
| sampled_ratio.py, shared_moments.py | what makes up for second moments of a small batch |
| host_replica.py, shard_step.py | a host that is one replica, whose ranks step on a shard each |
| step_agreement.py | what ranks compare in each exchange |
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oktopk.torch.updates.optimizer import UpdatesOptimizer

__all__ = ["UpdatesOptimizer"]


def __getattr__(name: str) -> Any:
    """Import the public class on first use."""
    if name == "UpdatesOptimizer":
        from oktopk.torch.updates.optimizer import UpdatesOptimizer

        return UpdatesOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
