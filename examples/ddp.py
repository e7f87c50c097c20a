"""One line in a DDP script. torchrun --nproc-per-node 2 examples/ddp.py."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk.torch import OkTopkState, ddp_hook

dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
torch.manual_seed(0)
target = torch.randn(20, 1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 1)))
state = OkTopkState(density=0.05)
model.register_comm_hook(state, ddp_hook)  # this is it
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

drawn = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(32, 20, generator=drawn)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), inputs @ target)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 59 == 0:
        sent = state.report.words / state.report.length
        print(f"step {step}: loss {loss:.3f}, sent {sent:.3f} words per gradient element", flush=True)
state.close()
dist.destroy_process_group()
