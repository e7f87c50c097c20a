"""Without torch: linear regression on flat NumPy vectors. mpiexec -n 2 python -m mpi4py examples/flat_numpy.py."""

import numpy as np
from mpi4py import MPI

from oktopk import GradientAllreduce

comm = MPI.COMM_WORLD
truth = np.random.default_rng(0).standard_normal(2000).astype(np.float32)  # the same on all ranks
own = np.random.default_rng(1 + comm.rank)  # what a rank sees is its own
weights = np.zeros_like(truth)
reducer = GradientAllreduce(comm, len(weights), method="oktopk", density=0.02)
for step in range(400):
    inputs = own.standard_normal((64, len(weights))).astype(np.float32)
    errors = inputs @ (weights - truth)
    report = reducer.step(inputs.T @ errors / len(errors))
    weights -= 0.01 * reducer.update  # the mean over the ranks
    if comm.rank == 0 and step % 399 == 0:
        print(f"step {step}: loss {np.mean(errors**2):.3f}, {report.words} words sent for n = {len(weights)}")
