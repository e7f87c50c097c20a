"""Hugging Face's Trainer with updates: evaluates, saves and goes on alike. torchrun --nproc-per-node 2 examples/hf_updates.py."""

import os
import shutil
from contextlib import ExitStack
from glob import glob
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from transformers import Trainer, TrainerCallback, TrainingArguments

from oktopk import DistributedOptimizer
from oktopk.elastic import redistribute


class Regression(nn.Module):
    """A small network, as the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels), "logits": labels}


class Agreed(TrainerCallback):
    """Evaluates and saves what all ranks agree on, with every rank's optimizer; while it trains, a rank has its own.

    Args:
        optimizer: a DistributedOptimizer, the Trainer's.
    """

    trainer: Trainer  # set it once there is one

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.within = optimizer, ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if hasattr(self.trainer.model_wrapped, "register_comm_hook"):  # a DDP, whose sums are switched off
            self.trainer.model_wrapped.register_comm_hook(None, noop_hook)
        saved = len(glob(self.file(args, state, "*")))
        if saved and (saved, args.world_size) != (1, 1):  # the Trainer has loaded rank 0's on all ranks
            here = args.process_index, args.world_size
            files = [self.file(args, state, rank) for rank in range(saved)]
            read = lambda rank: torch.load(files[rank], weights_only=True)  # noqa: E731
            self.optimizer.load_state_dict(redistribute(read, saved, *here, self.optimizer.hosts))
        self.within.enter_context(self.optimizer.agreed())  # eval_on_start

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate or control.should_save or control.should_training_stop:
            self.within.enter_context(self.optimizer.agreed())

    on_epoch_end = on_step_end

    def on_step_begin(self, *_: Any, **more: Any) -> None:
        self.within.close()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        torch.save(self.optimizer.state_dict(), self.file(args, state, args.process_index))

    def file(self, args: Any, state: Any, rank: Any) -> str:
        return f"{args.output_dir}/checkpoint-{state.global_step}/oktopk-{rank}.pt"


def trained(checkpoint: str | None = None) -> tuple[list[float], list[Any]]:
    """A training, which goes on from a checkpoint if one is given. Returns the losses, and all parameters."""
    model = Regression().to(arguments.device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = DistributedOptimizer(inner, density=0.05)
    agreed = Agreed(optimizer)
    data = {"train_dataset": examples, "eval_dataset": examples}
    agreed.trainer = Trainer(model, arguments, **data, optimizers=(optimizer, None), callbacks=[agreed])
    agreed.trainer.train(resume_from_checkpoint=checkpoint)
    losses = [entry["eval_loss"] for entry in agreed.trainer.state.log_history if "eval_loss" in entry]
    return losses, [
        value.tolist() for value in model.state_dict().values()
    ]  # as trainer.save_model() has them


folder = os.path.join(gettempdir(), f"hf-{os.getppid()}")
drawn = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
examples = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in drawn]
silent = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
often = {"max_steps": 62, "save_steps": 31, "eval_strategy": "steps", "eval_steps": 31, "eval_on_start": True}
ddp = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "use_cpu": True}
arguments = TrainingArguments(folder, per_device_eval_batch_size=512, **often, **silent, **ddp)
losses, whole = trained()
again = trained(f"{folder}/checkpoint-31")[1]
everyone: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(everyone, whole)
print(f"rank {dist.get_rank()}: alike on all ranks: {all(theirs == whole for theirs in everyone)}")
print(f"rank {dist.get_rank()}: goes on bit for bit: {again == whole}")
if dist.get_rank() == 0:
    shutil.rmtree(folder)
    print(f"at first: loss {losses[0]:.3f}\nat the end: loss {losses[-1]:.3f}")
dist.destroy_process_group()
