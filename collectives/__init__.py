"""Communication patterns for sparse and dense allreduce over MPI: no gradients, no thresholds, no torch."""

from collectives.sparse import ENTRY, SparseVector
from collectives.traffic import Traffic
from collectives.transport import Transport

__all__ = ["ENTRY", "SparseVector", "Traffic", "Transport"]
