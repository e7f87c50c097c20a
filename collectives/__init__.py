"""Communication patterns for sparse and dense allreduce: no gradients, no thresholds, no torch."""

from collectives.cuda.ucx import WITHOUT_CUDA_UCX  # loads the UCX that knows CUDA, before mpi4py.MPI starts
from collectives.sparse import ENTRY, SparseVector
from collectives.traffic import Traffic
from collectives.transport import Transport

__all__ = ["ENTRY", "WITHOUT_CUDA_UCX", "SparseVector", "Traffic", "Transport"]
