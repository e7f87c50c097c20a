"""A method of one's own: all ranks send the same k entries, in turn. mpiexec -n 2 python -m mpi4py examples/own_method.py."""

import math
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import SparseVector
from oktopk import METHODS, GradientAllreduce
from oktopk.methods.topka import TopkA
from oktopk.selection import LocalSelection, Selection
from oktopk.thresholds import NOTHING


class InTurn(LocalSelection):
    """Selects the k entries that follow those of the step before."""

    first = 0

    def select(self, gradient: Any, residual: Any, k: int, exact: bool, boundaries: Any = None) -> Selection:
        # adds the gradient to the residual, counts what is not finite, and packs nothing
        nonfinite = self.kernels.accumulate_select(gradient, residual, NOTHING, self.buffer(k)).nonfinite
        indices = np.sort((self.first + np.arange(k)) % self.length)
        self.first = (self.first + k) % self.length
        packed = SparseVector.from_pairs(indices, residual[indices], self.length)
        return Selection(packed, nonfinite, exact=False, threshold=math.nan)


class Cyclic(TopkA):
    """TopkA's exchange of that selection; error feedback keeps what was not sent."""

    name, selection_type = "cyclic", InTurn


METHODS["cyclic"] = Cyclic
reducer = GradientAllreduce(MPI.COMM_WORLD, 1000, "cyclic", density=0.1)
for step in range(10):
    reducer.step(np.ones(1000, np.float32))
    if MPI.COMM_WORLD.rank == 0:
        print(f"step {step}: entry {100 * step} becomes {reducer.update[100 * step]:g}")
