"""The Hugging Face Trainer, one process a rank. mpiexec -n 2 python -m mpi4py examples/hf_trainer.py."""

import os

import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

comm = MPI.COMM_WORLD
# MPI runs already. The Trainer would take its launcher's variables for its own, and look for MASTER_ADDR. Without them each
# rank is alone to it, so that checkpoints need a folder of their own on each. Clip by the optimizer's clip_norm.
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
    if comm.size > 1:  # else they tell oktopk that MPI does not see the other ranks
        os.environ.pop(name, None)
from transformers import Trainer, TrainingArguments  # noqa: E402


class Regression(nn.Module):
    """A small network, as the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels)}


drawn = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
examples = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in drawn[comm.rank :: comm.size]]
model = Regression()
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), density=0.05)
silent = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 31}
arguments = TrainingArguments(max_steps=62, use_cpu=True, max_grad_norm=0.0, **silent)
trainer = Trainer(model, arguments, train_dataset=examples, optimizers=(optimizer, None))
trainer.train()
if comm.rank == 0:
    for entry in trainer.state.log_history[:2]:
        print(f"step {entry['step']}: loss {float(entry['loss']):.3f}")
