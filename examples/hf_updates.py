"""Hugging Face's Trainer with updates: ranks evaluate and save alike. mpiexec -n 2 python -m mpi4py examples/hf_updates.py."""

import os
from contextlib import ExitStack
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

comm = MPI.COMM_WORLD
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE") if comm.size > 1 else ():
    os.environ.pop(name, None)  # as in hf_trainer.py
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402


class Regression(nn.Module):
    """A small network, as the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels), "logits": labels}


class Agreed(TrainerCallback):
    """Evaluates and saves what all ranks agree on, also after training; while it trains, a rank's parameters are its own."""

    within = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.within.enter_context(optimizer.agreed())

    on_epoch_end = on_step_end

    def on_step_begin(self, *_: Any, **more: Any) -> None:
        self.within.close()


drawn = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
examples = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in drawn]
model = Regression()
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), density=0.05)
silent = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
often = {"max_steps": 62, "eval_strategy": "steps", "eval_steps": 31, "eval_on_start": True}
arguments = TrainingArguments(
    use_cpu=True, max_grad_norm=0.0, per_device_eval_batch_size=512, **often, **silent
)
data = {"train_dataset": examples[comm.rank :: comm.size], "eval_dataset": examples}
trainer = Trainer(model, arguments, **data, optimizers=(optimizer, None), callbacks=[Agreed()])
trainer.train()
losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
held = [
    losses,
    *(value.tolist() for value in model.state_dict().values()),
]  # as trainer.save_model() saves it
print(f"rank {comm.rank}: alike on all ranks: {all(theirs == held for theirs in comm.allgather(held))}")
if comm.rank == 0:
    print(f"at first: loss {losses[0]:.3f}\nat the end: loss {losses[-1]:.3f}")
