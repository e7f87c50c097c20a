"""Accelerate with updates: saves and goes on alike. torchrun --nproc-per-node 2 examples/accelerate_updates.py."""

import os
import shutil
from glob import glob
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from oktopk import DistributedOptimizer
from oktopk.elastic import redistribute

accelerator = Accelerator(cpu=True)  # without this it takes GPUs


def made() -> tuple[Any, Any]:
    """A small network in a DDP whose sums are switched off, and its optimizer, as `prepare` returns them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(accelerator.device)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), density=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.register_comm_hook(None, noop_hook)
    return model, optimizer


def save(folder: str, optimizer: Any) -> None:
    """The model that all ranks agree on, and every rank's optimizer: Accelerate saves rank 0's alone."""
    with optimizer.optimizer.agreed():
        accelerator.save_state(folder)
    torch.save(optimizer.state_dict(), f"{folder}/oktopk-{accelerator.process_index}.pt")


def load(folder: str, optimizer: Any) -> None:
    """Go on from `save`, on any number of ranks."""
    accelerator.load_state(folder)  # rank 0's optimizer on all ranks

    def read(rank: int) -> Any:
        return torch.load(f"{folder}/oktopk-{rank}.pt", weights_only=True)

    ranks, hosts = len(glob(f"{folder}/oktopk-*.pt")), optimizer.optimizer.hosts
    here = accelerator.process_index, accelerator.num_processes
    optimizer.load_state_dict(redistribute(read, ranks, *here, hosts))


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Returns the losses."""
    losses = []
    for step in steps:
        drawn = torch.Generator().manual_seed(2 * step + accelerator.process_index)  # batches of its own
        inputs = torch.randn(8, 16, generator=drawn)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def agreed(model: nn.Module, optimizer: Any) -> list[Any]:
    """All parameters."""
    with optimizer.optimizer.agreed():
        return [value.tolist() for value in model.state_dict().values()]


folder = os.path.join(gettempdir(), f"accelerate-{os.getppid()}")
model, optimizer = made()
losses = train(model, optimizer, range(30))
save(folder, optimizer)
losses += train(model, optimizer, range(30, 60))
whole = agreed(model, optimizer)
accelerator.free_memory()
model, optimizer = made()  # in a new process
load(folder, optimizer)
train(model, optimizer, range(30, 60))
everyone: list[Any] = [None] * accelerator.num_processes
dist.all_gather_object(everyone, whole)
rank = accelerator.process_index
print(f"rank {rank}: alike on all ranks: {all(theirs == whole for theirs in everyone)}")
print(f"rank {rank}: goes on bit for bit: {agreed(model, optimizer) == whole}")
if accelerator.is_main_process:
    shutil.rmtree(folder)
    print(f"at first: loss {losses[0]:.3f}\nat the end: loss {losses[-1]:.3f}")
accelerator.end_training()
