"""Time of a step of gradients and of updates, in turns.

    oktopk-run -n 4 docs/results/updates/step_time.py [ROUNDS]
    torchrun --nproc-per-node 4 docs/results/updates/step_time.py [ROUNDS [WORDS]]        on GPUs

One JSON line: medians in ms of the slowest rank, and medians over the rounds of a way's time over that of gradients. Gradients are
new in each step. n = 5.8 M on CPUs, 97.6 M on GPUs, 133.5 M there with 63,136 words; density 1 %, AdamW with decay.
"""

import json
import os
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import oktopk
from oktopk import DistributedOptimizer

CUDA = torch.cuda.is_available()
HIDDEN, BLOCKS, WORDS = (768, 12, 16384) if CUDA else (256, 6, 4096)
WORDS = int(sys.argv[2]) if len(sys.argv) > 2 else WORDS
WARMUP = 24
BLOCK = [(3 * HIDDEN, HIDDEN), (3 * HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,)]
BLOCK += [(4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (HIDDEN, 4 * HIDDEN), (HIDDEN,)]
SHAPES = [(WORDS, HIDDEN), *BLOCKS * BLOCK]
ADAMW, OKTOPK, UNION = torch.optim.AdamW, {"method": "oktopk"}, {"method": "union"}
WAYS = {
    "gradients": ("gradients", ADAMW, OKTOPK),
    "updates": ("updates", ADAMW, OKTOPK),
    "updates, oktopk.torch.AdamW": ("updates", oktopk.torch.AdamW, OKTOPK),
    "updates, union": ("updates", ADAMW, UNION),
}
ON_GPUS = {
    "updates, int4": ("updates", ADAMW, {"wire": "int4", **OKTOPK}),
    "updates, union, int4": ("updates", ADAMW, {"wire": "int4", **UNION}),
}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if CUDA:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        rank, ranks, meet, slowest = dist.get_rank(), dist.get_world_size(), dist.barrier, slowest_gpu
    else:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        rank, ranks, meet = comm.rank, comm.size, comm.Barrier

        def slowest(seconds):
            return comm.allreduce(seconds, MPI.MAX)

    ways = {**WAYS, **(ON_GPUS if CUDA else {})}
    made = {}
    for name, (sends, kind, settings) in ways.items():
        torch.manual_seed(0)
        parameters = [nn.Parameter((torch.randn(shape) * 0.02).to(device)) for shape in SHAPES]
        optimizer = kind(parameters, lr=1e-4, fused=True)
        settings |= {"density": 0.01, "density_warmup_steps": 0, "sends": sends}
        made[name] = parameters, DistributedOptimizer(optimizer, **settings)
    alone = [nn.Parameter((torch.randn(shape) * 0.02).to(device)) for shape in SHAPES]
    made["AdamW alone"] = alone, torch.optim.AdamW(alone, lr=1e-4, fused=True)
    drawn = torch.Generator(device).manual_seed(rank)
    times, names = {name: [] for name in made}, list(made)
    for number in range(WARMUP + rounds):
        first = number % len(names)
        gradients = [torch.randn(shape, generator=drawn, device=device) * 1e-3 for shape in SHAPES]
        for name in names[first:] + names[:first]:
            parameters, optimizer = made[name]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            wait()
            meet()
            began = time.perf_counter()
            optimizer.step()
            wait()
            took = slowest(time.perf_counter() - began)
            if number >= WARMUP:
                times[name].append(1e3 * took)
    if rank == 0:
        pairs = {name: zip(series, times["gradients"], strict=True) for name, series in times.items()}
        over = {name: round(median(a / b for a, b in both), 3) for name, both in pairs.items()}
        ms = {name: round(median(series), 2) for name, series in times.items()}
        length = sum(torch.Size(shape).numel() for shape in SHAPES)
        device_name = torch.cuda.get_device_name() if CUDA else "cpu"
        result = {"device": device_name, "ranks": ranks, "n": length, "rounds": rounds, "ms": ms}
        print(json.dumps({**result, "over gradients": over}))
    for name in ways:
        made[name][1].close()
    if CUDA:
        dist.destroy_process_group()


def wait():
    if CUDA:
        torch.cuda.synchronize()


def slowest_gpu(seconds):
    longest = torch.tensor(seconds, device="cuda", dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


if __name__ == "__main__":
    main()
