"""Lightning with updates: evaluates, saves and goes on alike. torchrun --nproc-per-node 2 examples/lightning_updates.py."""

import os
from tempfile import gettempdir

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk import DistributedOptimizer
from oktopk.frameworks.lightning import Agreed


class Regression(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("loss", self.training_step(batch, number), sync_dist=True)

    def on_validation_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"loss {self.trainer.callback_metrics['loss']:.3f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return DistributedOptimizer(torch.optim.AdamW(self.parameters(), lr=1e-2), density=0.05)


inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
rows = TensorDataset(inputs, inputs.sum(1, keepdim=True))
saved = os.path.join(gettempdir(), f"lightning-{os.getppid()}.ckpt")
ranks = {"accelerator": "cpu", "devices": int(os.environ["LOCAL_WORLD_SIZE"]), "strategy": "ddp"}
silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
for epochs, checkpoint in ((1, None), (2, saved)):  # the second one goes on from the first
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[Agreed()], **ranks, **silent)
    trainer.fit(Regression(), DataLoader(rows, batch_size=8), DataLoader(rows, 256), ckpt_path=checkpoint)
    trainer.save_checkpoint(saved)
if trainer.is_global_zero:
    os.remove(saved)
dist.destroy_process_group()
