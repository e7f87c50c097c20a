"""Lightning with updates: evaluates, saves and goes on alike. torchrun --nproc-per-node 2 examples/lightning_updates.py."""

import os
from contextlib import ExitStack
from tempfile import gettempdir
from typing import Any

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils.data import DataLoader, TensorDataset

from oktopk import DistributedOptimizer
from oktopk.elastic import redistribute


class Agreed(lightning.LightningModule):
    """Validates, tests and saves what all ranks agree on, with every rank's optimizer; while it trains, a rank has its own."""

    def agreed(self) -> ExitStack:
        stack = ExitStack()
        for optimizer in self.trainer.optimizers:
            stack.enter_context(optimizer.agreed())
        return stack

    trained = validating = ExitStack()  # nothing entered
    saved: Any = None  # the optimizers of all ranks, of a checkpoint

    def on_validation_start(self) -> None:
        self.validating = self.agreed()

    def on_validation_end(self) -> None:
        self.validating.close()

    def on_train_end(self) -> None:
        self.trained = self.agreed()

    def on_train_start(self) -> None:
        self.trained.close()
        if hasattr(self.trainer.model, "register_comm_hook"):  # a DDP, whose sums are switched off
            self.trainer.model.register_comm_hook(None, noop_hook)
        if self.saved is not None:  # Lightning has loaded rank 0's on all ranks
            here = len(self.saved), self.global_rank, self.trainer.world_size
            for optimizer, *states in zip(self.trainer.optimizers, *self.saved, strict=True):
                optimizer.load_state_dict(redistribute(states.__getitem__, *here, optimizer.hosts))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with self.agreed():
            checkpoint["state_dict"] = {name: value.clone() for name, value in self.state_dict().items()}
        if self.trainer.world_size > 1 and "optimizer_states" in checkpoint:  # Lightning writes rank 0's
            every: Any = [None] * self.trainer.world_size if self.trainer.is_global_zero else None
            dist.gather_object(checkpoint["optimizer_states"], every)
            checkpoint["every_optimizer_states"] = every

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = checkpoint.get("every_optimizer_states")


class Regression(Agreed):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        losses.append(nn.functional.mse_loss(self.network(batch[0]), batch[1]).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return DistributedOptimizer(torch.optim.AdamW(self.parameters(), lr=1e-2), density=0.05)


def trained(epochs: int, checkpoint: str | None = None) -> lightning.Trainer:
    """A training of so many epochs, which goes on from a checkpoint if one is given."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    ranks = {"accelerator": "cpu", "devices": int(os.environ["LOCAL_WORLD_SIZE"]), "strategy": "ddp"}
    trainer = lightning.Trainer(max_epochs=epochs, use_distributed_sampler=False, **ranks, **silent)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = DataLoader(rows, batch_size=8, sampler=range(rank, 512, size))
    trainer.fit(Regression(), own, DataLoader(rows, batch_size=512), ckpt_path=checkpoint)
    return trainer


def held(trainer: lightning.Trainer) -> list[list[float]]:
    """All parameters, as a checkpoint has them."""
    saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
    return [value.tolist() for value in saved.values()]


losses: list[float] = []
inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
whole = trained(2)
first, last = losses[0], losses[-1]
saved = os.path.join(gettempdir(), f"lightning-{os.getppid()}.ckpt")
trained(1).save_checkpoint(saved)
again = trained(2, saved)
everyone: list[Any] = [None] * again.world_size
dist.all_gather_object(everyone, held(whole))
print(f"rank {again.global_rank}: alike on all ranks: {all(theirs == held(whole) for theirs in everyone)}")
print(f"rank {again.global_rank}: goes on bit for bit: {held(again) == held(whole)}")
if again.is_global_zero:
    os.remove(saved)
    print(f"at first: loss {first:.3f}\nat the end: loss {last:.3f}")
dist.destroy_process_group()
