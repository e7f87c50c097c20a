"""Lightning's Trainer, one process a rank. mpiexec -n 2 python -m mpi4py examples/lightning_trainer.py."""

import pytorch_lightning as lightning
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk import DistributedOptimizer

comm = MPI.COMM_WORLD


class Regression(lightning.LightningModule):
    """A small network; `configure_optimizers` is where the optimizer is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        if comm.rank == 0 and number % 31 == 0:
            print(f"step {number}: loss {loss:.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return DistributedOptimizer(torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9), density=0.05)


inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
share = slice(comm.rank * 512 // comm.size, (comm.rank + 1) * 512 // comm.size)
batches = DataLoader(TensorDataset(inputs[share], inputs[share].sum(1, keepdim=True)), batch_size=8)
silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
# one device: to Lightning each rank is alone, so that checkpoints need a folder of their own on each
lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **silent).fit(Regression(), batches)
