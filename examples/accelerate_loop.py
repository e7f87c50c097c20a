"""Accelerate's loop, one process a rank. mpiexec -n 2 python -m mpi4py examples/accelerate_loop.py."""

import os

import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

comm = MPI.COMM_WORLD
# MPI runs already. Accelerate would take its launcher's variables for its own, and look for MASTER_ADDR
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
    if comm.size > 1:  # else they tell oktopk that MPI does not see the other ranks
        os.environ.pop(name, None)
from accelerate import Accelerator  # noqa: E402

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), density=0.05)
model, optimizer = accelerator.prepare(model, optimizer)
drawn = torch.Generator().manual_seed(1 + comm.rank)  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(8, 16, generator=drawn)
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if comm.rank == 0 and step % 59 == 0:
        print(f"step {step}: loss {loss:.3f}")
