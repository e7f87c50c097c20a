"""Gaussiank: TopkA with a threshold from a Gaussian fit, corrected when it misses."""

from __future__ import annotations

from types import ModuleType

from collectives.mpi import Transport
from oktopk.gaussian import GaussianSelection
from oktopk.methods.topka import TopkA
from oktopk.settings import Settings


class Gaussiank(TopkA):
    """Selects by mean and deviation of the accumulated gradient, then allgathers.

    Gradients have heavier tails than a Gaussian, so that the plain fit selects too little; see `GaussianSelection`.

    Traffic: as TopkA, 2k(P-1) words a rank.
    Source: Shi et al., Understanding Top-k Sparsification in Distributed Deep Learning, 2019.
    """

    name = "gaussiank"

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        super().__init__(length, transport, kernels, settings)
        self.selection = GaussianSelection(length, kernels, transport)
