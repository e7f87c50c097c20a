"""The Hugging Face Trainer with the hook in its DDP. torchrun --nproc-per-node 2 examples/hf_hook.py."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from oktopk.torch import OkTopkState, ddp_hook


class Regression(nn.Module):
    """A small network, as the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels)}


class OkTopk(TrainerCallback):
    """Registers the hook once the Trainer has wrapped the model; saves and loads residuals with its checkpoints."""

    def on_train_begin(self, args: Any, at: Any, *more: Any, **others: Any) -> None:
        trainer.model_wrapped.register_comm_hook(state, ddp_hook)
        if os.path.exists(saved := self.file(args, at)):  # as it goes on from a checkpoint
            state.load_state_dict(torch.load(saved, weights_only=True))

    def on_save(self, args: Any, at: Any, *more: Any, **others: Any) -> None:
        torch.save(state.state_dict(), self.file(args, at))

    def file(self, args: Any, at: Any) -> str:
        return f"{args.output_dir}/checkpoint-{at.global_step}/oktopk-{args.process_index}.pt"


drawn = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
examples = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in drawn]
silent = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 31}
ddp = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
arguments = TrainingArguments(max_steps=62, learning_rate=1e-2, use_cpu=True, **silent, **ddp)
state = OkTopkState(density=0.05)
trainer = Trainer(Regression(), arguments, train_dataset=examples, callbacks=[OkTopk()])
trainer.train()
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history[:2]:
        print(f"step {entry['step']}: loss {float(entry['loss']):.3f}")
    print(f"sent {state.report.words / state.report.length:.3f} words per gradient element")
dist.destroy_process_group()
