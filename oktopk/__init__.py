"""Near-optimal sparse allreduce for data-parallel training: thresholds, regions, error feedback, optimizer wrapper.

Importing it starts neither MPI nor torch: names and modules below are imported on first use, MPI when a communicator of it is.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import collectives  # noqa: F401 - before mpi4py.MPI: it loads the UCX that knows CUDA

if TYPE_CHECKING:
    from collectives.errors import MissingRanksError
    from collectives.launchers import LauncherError
    from oktopk import buckets, elastic, rows, torch  # noqa: F401
    from oktopk.allreduce import GradientAllreduce, NonFiniteGradientError
    from oktopk.methods import METHODS
    from oktopk.results import StepReport
    from oktopk.settings import Settings, falling_density
    from oktopk.torch.kinds import DistributedOptimizer
    from oktopk.torch.modules import average_buffers, broadcast_parameters

__all__ = [
    "METHODS",
    "DistributedOptimizer",
    "GradientAllreduce",
    "LauncherError",
    "MissingRanksError",
    "NonFiniteGradientError",
    "Settings",
    "StepReport",
    "average_buffers",
    "broadcast_parameters",
    "falling_density",
]
__version__ = "0.1.0"

_MODULES = {
    "METHODS": "oktopk.methods",
    "DistributedOptimizer": "oktopk.torch.kinds",
    "GradientAllreduce": "oktopk.allreduce",
    "LauncherError": "collectives.launchers",
    "MissingRanksError": "collectives.errors",
    "NonFiniteGradientError": "oktopk.allreduce",
    "Settings": "oktopk.settings",
    "StepReport": "oktopk.results",
    "average_buffers": "oktopk.torch.modules",
    "broadcast_parameters": "oktopk.torch.modules",
    "falling_density": "oktopk.settings",
}
# not in __all__: with `from oktopk import *` they would hide torch and other names of a user's
_SUBMODULES = ("buckets", "elastic", "rows", "torch")


def __getattr__(name: str) -> Any:
    """Import a public name or module on first use.

    Raises:
        ImportError: it needs torch; the message says what to install.
    """
    if name in _SUBMODULES:
        _refuse_without_torch(name, f"oktopk.{name}")
        return import_module(f"oktopk.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'oktopk' has no attribute {name!r}")
    module = _MODULES[name]
    _refuse_without_torch(name, module)
    value = globals()[name] = getattr(import_module(module), name)
    return value


def _refuse_without_torch(name: str, module: str) -> None:
    if module.startswith("oktopk.torch") and find_spec("torch") is None:
        raise ImportError(f"oktopk.{name} needs torch: pip install 'oktopk[torch]'")
