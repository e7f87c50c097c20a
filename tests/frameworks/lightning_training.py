"""What `oktopk.frameworks.lightning` promises, on a training that stops and goes on: PACKAGE FOLDER.

The folder keeps a checkpoint: a second start, with another number of ranks, goes on from that alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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

lightning: Any = importlib.import_module(sys.argv[1])

from oktopk.frameworks.lightning import Agreed  # noqa: E402 - it takes the package that is there

LOSSES: list[float] = []


class Regression(lightning.LightningModule):
    """A small network."""

    def __init__(self, kind: str = "updates") -> None:
        super().__init__()
        self.network, self.kind = network(), kind

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        LOSSES.append(nn.functional.mse_loss(self.network(batch[0]), batch[1]).item())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self, self.kind)


class Saves(lightning.Callback):
    """Saves weights alone amid an epoch, and looks at what parameters hold then."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if number != 5 or trainer.current_epoch:
            return
        own = digest(module.parameters())
        dump = trainer._checkpoint_connector.dump_checkpoint
        weights = digest(dump(weights_only=True)["state_dict"].values())
        say("ranks part amid an epoch", not alike(own))
        say("weights that are saved alone are alike", alike(weights))
        if not UNDER_MPI:
            say(
                "a whole checkpoint has the same",
                digest(dump(weights_only=False)["state_dict"].values()) == weights,
            )


def trainer_of(epochs: int, *callbacks: Any) -> Any:
    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    ranks = {"devices": 1} if UNDER_MPI else {"devices": RANKS, "strategy": "ddp"}
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        use_distributed_sampler=False,
        callbacks=[Agreed(), *callbacks],
        **ranks,
        **silent,
    )


DATA = TensorDataset(rows(), rows().sum(1, keepdim=True))
OWN = DataLoader(DATA, batch_size=8, sampler=range(RANK, 512 // RANKS * RANKS, RANKS))
ALL = DataLoader(DATA, batch_size=512)


def train(epochs: int, checkpoint: str | None = None, *callbacks: Any, kind: str = "updates") -> Any:
    trainer = trainer_of(epochs, *callbacks)
    trainer.fit(Regression(kind), OWN, ALL, ckpt_path=checkpoint)
    return trainer


def held(trainer: Any) -> str:
    return digest(trainer.lightning_module.parameters())


def main(folder: str) -> None:
    file = os.path.join(own_folder(folder), "stopped.ckpt")
    if not os.path.exists(file):
        whole = train(2, None, Saves())
        trainer = train(1)
        trainer.save_checkpoint(file)
        say("goes on bit for bit", held(train(2, file)) == held(whole))
        say("without saving it is the same", held(train(2)) == held(whole))
        if not UNDER_MPI:
            say("plain AdamW is left alone", alike(held(train(1, kind="plain"))))
        losses, before = [*LOSSES], held(whole)
        whole.test(whole.lightning_module, ALL, verbose=False)
        say("a test changes nothing", held(whole) == before and alike(LOSSES[-1]))
        whole.fit_loop.max_epochs = 3
        whole.fit(whole.lightning_module, OWN, ALL)  # its optimizer is made anew
        say("a further training is alike", alike(held(whole)) and held(whole) != before)
    else:
        losses = LOSSES
        whole = train(2, file)
    say("all ranks end alike", alike(held(whole)))
    say("validation is alike", len(losses) >= 2 and alike(tuple(losses)))
    say("it learns", losses[-1] < 0.7 * losses[0])


main(sys.argv[2])
if not UNDER_MPI:
    dist.destroy_process_group()  # once the Trainers are gone: docs/frameworks.md
