"""Time of a step on CPUs, of gradients and of updates, in turns: oktopk-run -n 4 docs/results/updates/step_cpu.py [ROUNDS].

One JSON line: medians in ms of the slowest rank, and medians over the rounds of a way's time over that of gradients. Gradients are
new in each step. n = 5.8 M, density 1 %, AdamW with decay.
"""

import json
import sys
import time
from statistics import median

import torch
from mpi4py import MPI
from torch import nn

import oktopk
from oktopk import DistributedOptimizer

HIDDEN, BLOCKS, WARMUP = 256, 6, 24
BLOCK = [(3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,)]
BLOCK += [(4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (HIDDEN, 4 * HIDDEN), (HIDDEN,)]
SHAPES = [(4096, HIDDEN), *BLOCKS * BLOCK]
WAYS = {
    "gradients": ("gradients", torch.optim.AdamW),
    "updates": ("updates", torch.optim.AdamW),
    "updates, oktopk.torch.AdamW": ("updates", oktopk.torch.AdamW),
}


def main():
    comm, rounds = MPI.COMM_WORLD, int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    made = {}
    for name, (sends, kind) in WAYS.items():
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
        optimizer = DistributedOptimizer(kind(parameters, lr=1e-4, fused=True), density=0.01, sends=sends)
        made[name] = parameters, optimizer
    drawn = torch.Generator().manual_seed(comm.rank)
    pool = [[torch.randn(shape, generator=drawn) * 1e-3 for shape in SHAPES] for _ in range(4)]
    times, names = {name: [] for name in WAYS}, list(WAYS)
    for number in range(WARMUP + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            parameters, optimizer = made[name]
            for parameter, gradient in zip(parameters, pool[number % 4], strict=True):
                parameter.grad = gradient.clone()
            comm.Barrier()
            began = time.perf_counter()
            optimizer.step()
            took = comm.allreduce(time.perf_counter() - began, MPI.MAX)
            if number >= WARMUP:
                times[name].append(1e3 * took)
    if comm.rank == 0:
        pairs = {name: zip(series, times["gradients"], strict=True) for name, series in times.items()}
        over = {name: round(median(a / b for a, b in both), 3) for name, both in pairs.items()}
        ms = {name: round(median(series), 2) for name, series in times.items()}
        length = sum(torch.Size(shape).numel() for shape in SHAPES)
        print(
            json.dumps({"ranks": comm.size, "n": length, "rounds": rounds, "ms": ms, "over gradients": over})
        )


if __name__ == "__main__":
    main()
