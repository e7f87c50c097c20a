"""Two replicas of a model that FSDP2 shards over two ranks, under AdamW. torchrun --nproc-per-node 4 examples/hsdp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oktopk import DistributedOptimizer

dist.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
target = torch.randn(20, 1)
model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
fully_shard(model[2], mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])  # over the shards alone: FSDP2 would reduce densely over both
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# the line that is new
optimizer = DistributedOptimizer(optimizer, mesh["replicate"].get_group(), density=0.05)

drawn = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(32, 20, generator=drawn)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs @ target)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 59 == 0:
        sent = optimizer.report.words / optimizer.report.length
        print(f"step {step}: loss {loss:.3f}, sent {sent:.3f} words per element of the shard", flush=True)
with optimizer.agreed():  # equal on all replicas: to evaluate, and for torch.distributed.checkpoint
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
optimizer.close()
dist.destroy_process_group()
