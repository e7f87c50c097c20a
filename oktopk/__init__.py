"""Near-optimal sparse allreduce for data-parallel training: thresholds, regions, error feedback, optimizer wrapper."""

from typing import TYPE_CHECKING, Any

import collectives  # noqa: F401 - before mpi4py.MPI: it loads the UCX that knows CUDA
from oktopk.allreduce import GradientAllreduce, NonFiniteGradientError
from oktopk.methods import METHODS
from oktopk.results import StepReport
from oktopk.settings import Settings

if TYPE_CHECKING:
    from oktopk.torch.modules import average_buffers, broadcast_parameters
    from oktopk.torch.optimizer import DistributedOptimizer

__all__ = [
    "METHODS",
    "DistributedOptimizer",
    "GradientAllreduce",
    "NonFiniteGradientError",
    "Settings",
    "StepReport",
    "average_buffers",
    "broadcast_parameters",
]
__version__ = "0.1.0"

_NEEDS_TORCH = ("DistributedOptimizer", "average_buffers", "broadcast_parameters")


def __getattr__(name: str) -> Any:
    """Import the torch wrapper on first use: those who bring flat NumPy vectors need no torch."""
    if name in _NEEDS_TORCH:
        from oktopk.torch import modules, optimizer

        return getattr(optimizer if name == "DistributedOptimizer" else modules, name)
    raise AttributeError(f"module 'oktopk' has no attribute {name!r}")
