"""`DistributedOptimizer` with the classes of which it makes one."""

from oktopk.torch.gradients_optimizer import GradientsOptimizer
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.updates.optimizer import UpdatesOptimizer

__all__ = ["DistributedOptimizer", "GradientsOptimizer", "UpdatesOptimizer"]
