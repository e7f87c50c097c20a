"""DDP inside hosts, here two of two ranks, updates between them. torchrun --nproc-per-node 4 examples/summed_hosts.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk import DistributedOptimizer

dist.init_process_group("gloo")  # "nccl" on GPUs, after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_num_threads(1)
per_host = 2  # between machines int(os.environ["LOCAL_WORLD_SIZE"])
host, _ = dist.new_subgroups(per_host)
torch.manual_seed(0)
target = torch.randn(20, 1)
model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
ddp = DistributedDataParallel(model, process_group=host)  # over the ranks of the host alone
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# the line that is new; between machines leave out ranks_per_host, which makes hosts of this one's ranks
optimizer = DistributedOptimizer(optimizer, density=0.05, replica="summed", ranks_per_host=per_host)

drawn = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(32, 20, generator=drawn)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(inputs), inputs @ target)
    loss.backward()  # DDP makes gradients the host's mean
    optimizer.step()
    if dist.get_rank() == 0 and step % 59 == 0:
        print(f"step {step}: loss {loss:.3f}; {optimizer.report}", flush=True)
with optimizer.agreed():  # equal on all ranks: to evaluate and to save
    weights = {name: value.clone() for name, value in model.state_dict().items()}
optimizer.close()
dist.destroy_process_group()
