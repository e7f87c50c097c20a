"""What `oktopk.frameworks.transformers` promises, on a training that stops and goes on: FOLDER.

The folder keeps a checkpoint: a second start, with another number of ranks, goes on from that alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.ranks import (
    RANK,
    RANKS,
    UNDER_MPI,
    alike,
    digest,
    network,
    optimizer_of,
    own_folder,
    rows,
    say,
)

# isort: split
from transformers import Trainer, TrainerCallback, TrainingArguments

from oktopk.frameworks.transformers import Agreed


class Regression(nn.Module):
    """A small network, as the Trainer calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.network(inputs), labels), "logits": labels}


class Asks(TrainerCallback):
    """Asks for one more evaluation, after `Agreed` was called, and looks at what parameters hold."""

    parted: bool | None = None  # until it was asked
    evaluated_alike: bool | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == 7:
            self.parted = not alike(digest(model.parameters()))
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.evaluated_alike = self.evaluated_alike is not False and alike(digest(model.parameters()))


EXAMPLES = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in rows()]


def trainer_of(folder: str, kind: str = "updates", resume: str | None = None, **more: Any) -> Any:
    silent = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    often = {"max_steps": 62, "save_steps": 31, "eval_strategy": "steps", "eval_steps": 31}
    ddp = {} if UNDER_MPI else {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    more = {
        "use_cpu": True,
        "eval_on_start": True,
        "per_device_eval_batch_size": 512,
        "max_grad_norm": 0.0,
    } | more
    arguments = TrainingArguments(folder, **{**often, **silent, **ddp, **more})
    model = Regression().to(arguments.device)
    asks = Asks()
    own = EXAMPLES[RANK::RANKS] if UNDER_MPI else EXAMPLES
    trainer = Trainer(
        model,
        arguments,
        train_dataset=own,
        eval_dataset=EXAMPLES,
        optimizers=(optimizer_of(model, kind), None),
        callbacks=[Agreed(resume), asks],
    )
    trainer.asks = asks
    return trainer


def held(trainer: Any) -> str:
    return digest(trainer.model.parameters())


def main(folder: str) -> None:
    folder = own_folder(folder)
    kept, moved = f"{folder}/trained/checkpoint-31", f"{folder}/moved"
    if not os.path.exists(moved):
        trainer = trainer_of(f"{folder}/trained")
        trainer.train()
        whole = held(trainer)
        say("ranks part amid training", bool(trainer.asks.parted))
        say("evaluation is alike", bool(trainer.asks.evaluated_alike))
        trainer.evaluate()
        say("evaluation after it changes nothing", held(trainer) == whole)
        trainer.train(resume_from_checkpoint=kept)
        say("the same trainer goes on bit for bit", held(trainer) == whole)
        trainer.optimizer.optimizer.close()
        again = trainer_of(f"{folder}/trained")
        again.train(resume_from_checkpoint=kept)
        say("goes on bit for bit", held(again) == whole)
        if not UNDER_MPI:
            dist.barrier()
        if RANK == 0 or UNDER_MPI:
            shutil.copytree(kept, moved)
        if not UNDER_MPI:
            dist.barrier()
        try:
            trainer_of(f"{folder}/elsewhere").train(resume_from_checkpoint=moved)
            say("another folder is asked for", False)
        except ValueError as error:
            say("another folder is asked for", "resume_from_checkpoint" in str(error))
        elsewhere = trainer_of(f"{folder}/elsewhere", resume=moved)
        elsewhere.train(resume_from_checkpoint=moved)
        say("goes on from another folder bit for bit", held(elsewhere) == whole)
        best = trainer_of(f"{folder}/best", load_best_model_at_end=True, eval_on_start=False)
        best.train()
        say("the best model at the end is alike", alike(held(best)) and held(best) == whole)
        if not UNDER_MPI:
            plain = trainer_of(f"{folder}/plain", kind="plain")
            plain.train()
            say("plain AdamW is left alone", alike(held(plain)))
    else:
        trainer = trainer_of(f"{folder}/{RANKS}", resume=moved)
        trainer.train(resume_from_checkpoint=moved)
    say("all ranks end alike", alike(held(trainer)))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    say("it learns", losses[-1] < 0.7 * losses[0])


main(sys.argv[1])
if not UNDER_MPI:
    dist.destroy_process_group()  # once the Trainers are gone: docs/frameworks.md
