"""Hugging Face's Trainer with updates: evaluates, saves and goes on alike. torchrun --nproc-per-node 2 examples/hf_updates.py."""

import os
import shutil
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

from oktopk import DistributedOptimizer
from oktopk.frameworks.transformers import Agreed


class Regression(nn.Module):
    """A small network, as the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels), "logits": labels}


folder = os.path.join(gettempdir(), f"hf-{os.getppid()}")
drawn = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
examples = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in drawn]
silent = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
often = {"save_steps": 31, "eval_strategy": "steps", "eval_steps": 31, "eval_on_start": True}
ddp = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "use_cpu": True}
for steps, checkpoint in ((31, None), (62, f"{folder}/checkpoint-31")):  # the second one goes on
    arguments = TrainingArguments(folder, max_steps=steps, **often, **silent, **ddp)
    model = Regression()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), density=0.05)
    data = {"train_dataset": examples, "eval_dataset": examples}
    trainer = Trainer(model, arguments, **data, optimizers=(optimizer, None), callbacks=[Agreed()])
    trainer.train(resume_from_checkpoint=checkpoint)
if trainer.is_world_process_zero():
    shutil.rmtree(folder)
    for entry in trainer.state.log_history[:-1]:  # the last one is a summary
        print(f"step {entry['step']}: loss {entry['eval_loss']:.3f}")
dist.destroy_process_group()
