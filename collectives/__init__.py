"""Communication patterns for sparse and dense allreduce over MPI: no gradients, no thresholds, no torch."""

from typing import TYPE_CHECKING, Any

from collectives.cuda.ucx import load_cuda_ucx
from collectives.sparse import ENTRY, SparseVector
from collectives.traffic import Traffic

if TYPE_CHECKING:
    from collectives.mpi import Transport

WITHOUT_CUDA_UCX = load_cuda_ucx()  # before anything imports mpi4py.MPI
"""Why the wheel's UCX with CUDA is not loaded; empty if it is."""

__all__ = ["ENTRY", "WITHOUT_CUDA_UCX", "SparseVector", "Traffic", "Transport"]


def __getattr__(name: str) -> Any:
    """Import the transport on first use: it starts MPI, which whoever wants a formula alone does not need."""
    if name == "Transport":
        from collectives.mpi import Transport

        return Transport
    raise AttributeError(f"module 'collectives' has no attribute {name!r}")
