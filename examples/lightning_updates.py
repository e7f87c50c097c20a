"""Lightning with updates: ranks evaluate and save alike. mpiexec -n 2 python -m mpi4py examples/lightning_updates.py."""

from contextlib import ExitStack
from typing import Any

import pytorch_lightning as lightning
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk import DistributedOptimizer

comm = MPI.COMM_WORLD


class Agreed(lightning.LightningModule):
    """Validates, tests and saves what all ranks agree on; while it trains, a rank's parameters are its own."""

    def agreed(self) -> ExitStack:
        stack = ExitStack()
        for optimizer in self.trainer.optimizers:
            stack.enter_context(optimizer.agreed())
        return stack

    trained = validating = ExitStack()  # nothing entered

    def on_validation_start(self) -> None:
        self.validating = self.agreed()

    def on_validation_end(self) -> None:
        self.validating.close()

    def on_train_end(self) -> None:
        self.trained = self.agreed()

    def on_train_start(self) -> None:
        self.trained.close()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with self.agreed():
            checkpoint["state_dict"] = {name: value.clone() for name, value in self.state_dict().items()}


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
        inner = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return DistributedOptimizer(inner, density=0.05)


losses: list[float] = []
inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
own = DataLoader(rows, batch_size=8, sampler=range(comm.rank, 512, comm.size))
silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, **silent)
trainer.fit(Regression(), own, DataLoader(rows, batch_size=512))
saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)["state_dict"]
held = [losses, *(value.tolist() for value in saved.values())]
print(f"rank {comm.rank}: alike on all ranks: {all(theirs == held for theirs in comm.allgather(held))}")
if comm.rank == 0:
    print(f"at first: loss {losses[0]:.3f}\nat the end: loss {losses[-1]:.3f}")
