"""Communication patterns for sparse and dense allreduce over MPI: no gradients, no thresholds, no torch."""

from typing import TYPE_CHECKING, Any

from collectives.cuda_mpi import load_cuda_ucx
from collectives.sparse import ENTRY, SparseVector
from collectives.traffic import Traffic

if TYPE_CHECKING:
    from collectives.transport import Transport

WITHOUT_CUDA_UCX = load_cuda_ucx()  # before anything imports mpi4py.MPI
"""Why the wheel's UCX with CUDA is not loaded; empty if it is."""

__all__ = ["ENTRY", "WITHOUT_CUDA_UCX", "SparseVector", "Traffic", "Transport"]


def __getattr__(name: str) -> Any:
    """Import the transport on first use: it starts MPI, which whoever wants a formula alone does not need."""
    if name == "Transport":
        from collectives.transport import Transport

        return Transport
    raise AttributeError(f"module 'collectives' has no attribute {name!r}")
