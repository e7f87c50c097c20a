"""Bytes that a host sends to others over the ranks of a host: oktopk-run -n RANKS docs/results/updates/replica_bytes.py HOSTS WIRE.

One JSON line: the mean over hosts of what its ranks sent to other hosts in an exchange, the mean over exchanges, without and with the
sums that measure the ratio; and least and most of an exchange. Each rank's gradients are noise of its own, new in each step. n = 1.05 M,
density 1 %, AdamW.
"""

import json
import sys

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

LENGTH, WARMUP, EXCHANGES = 1 << 20, 21, 30  # after the 20 exchanges that all measure the ratio


def main():
    comm, hosts, wire = MPI.COMM_WORLD, int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(LENGTH) * 0.02)
    several = comm.size > hosts
    placed = {"replica": "host", "ranks_per_host": comm.size // hosts} if several else {"replica": "rank"}
    inner = torch.optim.AdamW([weight], lr=1e-3)
    optimizer = DistributedOptimizer(
        inner, comm, "oktopk", density=0.01, density_warmup_steps=0, wire=wire, **placed
    )
    drawn, sent, ratio = torch.Generator().manual_seed(comm.rank), [], []
    for number in range(WARMUP + EXCHANGES):
        weight.grad = torch.randn(LENGTH, generator=drawn)
        optimizer.step()
        report = optimizer.report
        # a host of one rank sends all of it to others
        mine = report.bytes_between if several else report.bytes
        if number >= WARMUP:
            (sent if number % 10 else ratio).append(comm.allreduce(mine) / hosts)
    if comm.rank == 0:
        shown = {
            "wire": wire,
            "hosts": hosts,
            "ranks of a host": comm.size // hosts,
            "replicas": report.replicas,
        }
        shown |= {"bytes": round(np.mean(sent)), "least": min(sent), "most": max(sent)}
        print(json.dumps(shown | {"with the ratio": round(np.mean(ratio))}))


if __name__ == "__main__":
    main()
