"""Accelerate with the hook in its DDP. torchrun --nproc-per-node 2 examples/accelerate_hook.py."""

import torch
from accelerate import Accelerator
from torch import nn

from oktopk.torch import OkTopkState, ddp_hook

accelerator = Accelerator(cpu=True)  # without this it takes GPUs
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
state = OkTopkState(density=0.05)
model.register_comm_hook(state, ddp_hook)  # what prepare() returned is a DistributedDataParallel
drawn = torch.Generator().manual_seed(1 + accelerator.process_index)  # every rank has batches of its own
for step in range(60):
    inputs = torch.randn(8, 16, generator=drawn)
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process and step % 59 == 0:
        sent = state.report.words / state.report.length
        print(f"step {step}: loss {loss:.3f}, sent {sent:.3f} words per gradient element", flush=True)
state.close()
accelerator.end_training()
