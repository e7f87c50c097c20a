"""Time of a training step between replicas of a model that FSDP2 shards: a replica a host, two shards each.

    jobs/bench/net.sh --hosts 2 --ranks 4 --rate 1gbit --module docs.results.updates.hsdp_time [STEPS]

One JSON line: medians in ms of the slowest rank, of ways in turns, under SGD with momentum, density 1 %, n = 4.2 M. At ac38c58a this
script timed a hook on each module's gradients, too, which is gone.
"""

import json
import os
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oktopk import DistributedOptimizer

HIDDEN, LAYERS, WARMUP = 1024, 4, 10


def made(mesh, way):
    """A sharded model, and what steps it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"] if way != "dense" else mesh)
    fully_shard(model, mesh=mesh["shard"] if way != "dense" else mesh)
    group, closed = mesh["replicate"].get_group(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if way.startswith("updates"):
        method = "union" if way.endswith("union") else "oktopk"
        optimizer = DistributedOptimizer(optimizer, group, method, density=0.01, sends="updates")
        closed.append(optimizer)
    return model, optimizer, closed


def main():
    world, steps = MPI.COMM_WORLD, int(sys.argv[1]) if len(sys.argv) > 1 else 40
    torch.set_num_threads(1)
    address = world.bcast(os.popen("hostname -I").read().split()[0] if world.rank == 0 else None)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("replicate", "shard"))
    ways = ["dense", "updates", "updates by union"]
    all_made = {way: made(mesh, way) for way in ways}
    drawn = torch.Generator().manual_seed(world.rank)
    times = {way: [] for way in ways}
    for step in range(WARMUP + steps):
        for number in range(len(ways)):
            way = ways[(number + step) % len(ways)]
            model, optimizer, _ = all_made[way]
            x = torch.randn(16, HIDDEN, generator=drawn)
            world.Barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            took = world.allreduce(time.perf_counter() - began, MPI.MAX)
            if step >= WARMUP:
                times[way].append(1e3 * took)
    if world.rank == 0:
        print(
            json.dumps(
                {"steps": steps, "ms": {way: round(median(series), 1) for way, series in times.items()}}
            )
        )
    for _, _, closed in all_made.values():
        for each in closed:
            each.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
