"""Communication patterns for sparse and dense allreduce: no gradients, no thresholds, no torch.

Importing it loads the UCX that knows CUDA, before mpi4py.MPI starts; the names below are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives.cuda.ucx import WITHOUT_CUDA_UCX

if TYPE_CHECKING:
    from collectives.sparse import ENTRY, SparseVector
    from collectives.traffic import Traffic
    from collectives.transport import Transport

__all__ = ["ENTRY", "WITHOUT_CUDA_UCX", "SparseVector", "Traffic", "Transport"]

_MODULES = {
    "ENTRY": "sparse",
    "SparseVector": "sparse",
    "Traffic": "traffic",
    "Transport": "transport",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `oktopk-run` needs none, and `oktopk-doctor` runs where NumPy is missing."""
    if name not in _MODULES:
        raise AttributeError(f"module 'collectives' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"collectives.{_MODULES[name]}"), name)
    return value
