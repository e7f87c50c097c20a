"""Without MPI: torchrun starts the ranks. torchrun --nproc-per-node 2 examples/torchrun.py."""

import os

import torch
import torch.distributed as dist

from oktopk import DistributedOptimizer

dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
target = torch.randn(20, 1)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), density=0.05)

drawn = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(32, 20, generator=drawn)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), inputs @ target)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 59 == 0:
        sent = optimizer.report.words / optimizer.length
        print(f"step {step}: loss {loss:.3f}, sent {sent:.3f} words per gradient element", flush=True)
optimizer.close()
dist.destroy_process_group()
