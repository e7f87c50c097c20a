"""Hosts as replicas, here two of two ranks, under AdamW. torchrun --nproc-per-node 4 examples/hosts.py."""

import torch
import torch.distributed as dist
from torch import nn

from oktopk import DistributedOptimizer

dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_num_threads(1)
torch.manual_seed(0)
target = torch.randn(20, 1)
model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# the line that is new; between machines leave out ranks_per_host, which makes hosts of this one's ranks
optimizer = DistributedOptimizer(optimizer, density=0.05, replica="host", ranks_per_host=2)

drawn = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(32, 20, generator=drawn)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs @ target)
    loss.backward()
    optimizer.step()  # on the mean gradient of the host's ranks
    if dist.get_rank() == 0 and step % 59 == 0:
        print(f"step {step}: loss {loss:.3f}; {optimizer.report}", flush=True)
with optimizer.agreed():  # equal on all ranks: to evaluate and to save
    weights = {name: value.clone() for name, value in model.state_dict().items()}
optimizer.close()
dist.destroy_process_group()
