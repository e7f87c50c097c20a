"""Seconds of the first steps around AdamW between hosts: jobs/bench/net.sh --rate 100mbit --module docs.results.updates.first_steps WIRE.

One JSON line: the mean and the median of steps 9 to 48, and which share of the vector the largest region has then. Each rank's gradients
are noise of its own, new in each step. n = 4.2 M, density 1 %.
"""

import json
import statistics
import sys
import time

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

LENGTH, SKIPPED, STEPS = 1 << 22, 8, 48


def main():
    comm, wire = MPI.COMM_WORLD, sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(LENGTH) * 0.02)
    inner = torch.optim.AdamW([weight], lr=1e-3)
    optimizer = DistributedOptimizer(inner, comm, "oktopk", density=0.01, density_warmup_steps=0, wire=wire)
    drawn, seconds = torch.Generator().manual_seed(comm.rank), []
    for _ in range(STEPS):
        weight.grad = torch.randn(LENGTH, generator=drawn)
        comm.barrier()
        began = time.perf_counter()
        optimizer.step()
        seconds.append(comm.allreduce(time.perf_counter() - began, MPI.MAX))
    if comm.rank == 0:
        timed = seconds[SKIPPED:]
        boundaries = optimizer.reducer.state_dict()["methods"]["oktopk"]["boundaries"]
        result = {"wire": wire, "ranks": comm.size, "mean_ms": round(1e3 * statistics.mean(timed), 1)}
        result["median_ms"] = round(1e3 * statistics.median(timed), 1)
        print(json.dumps(result | {"largest region": round(float(np.diff(boundaries).max() / LENGTH), 3)}))


if __name__ == "__main__":
    main()
