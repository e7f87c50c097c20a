"""Accelerate with updates: evaluates, saves and goes on alike. torchrun --nproc-per-node 2 examples/accelerate_updates.py."""

import os
import shutil
from tempfile import gettempdir

import torch
from accelerate import Accelerator
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.frameworks.accelerate import agree

accelerator = Accelerator(cpu=True)  # without this it takes GPUs
folder = os.path.join(gettempdir(), f"accelerate-{os.getppid()}")
drawn = torch.Generator().manual_seed(1 + accelerator.process_index)
batches = torch.randn(60, 8, 16, generator=drawn)  # every rank has its own
loss, held_out = nn.MSELoss(), torch.eye(16)


def evaluate() -> None:
    """A forward pass in eval mode without gradients: all ranks have the same parameters in it."""
    model.eval()
    with torch.no_grad():
        accelerator.print(f"loss {loss(model(held_out), held_out.sum(1, keepdim=True)):.3f}", flush=True)


for steps in (slice(0, 30), slice(30, 60)):  # the second training goes on from the first
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), density=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    agree(accelerator, model, optimizer)
    if steps.start:
        accelerator.load_state(folder)
    evaluate()
    model.train()
    for inputs in batches[steps]:
        optimizer.zero_grad()
        accelerator.backward(loss(model(inputs), inputs.sum(1, keepdim=True)))
        optimizer.step()
    evaluate()
    accelerator.save_state(folder)
    accelerator.free_memory()
if accelerator.is_main_process:
    shutil.rmtree(folder)
accelerator.end_training()
