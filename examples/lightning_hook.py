"""Lightning's Trainer with the hook in its DDP. torchrun --nproc-per-node 2 examples/lightning_hook.py."""

import os

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk.torch import OkTopkState, ddp_hook


class Regression(lightning.LightningModule):
    """A small network; `on_train_start` comes after Lightning has wrapped it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def on_train_start(self) -> None:
        # on GPUs DDPStrategy(ddp_comm_state=..., ddp_comm_hook=ddp_hook) does the same
        self.trainer.model.register_comm_hook(state, ddp_hook)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        if self.trainer.is_global_zero and number % 31 == 0:
            print(f"step {number}: loss {loss:.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
batches = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
ranks = int(os.environ["LOCAL_WORLD_SIZE"])
state = OkTopkState(density=0.05)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=ranks, strategy="ddp", **silent)
trainer.fit(Regression(), batches)
if trainer.is_global_zero:
    print(f"sent {state.report.words / state.report.length:.3f} words per gradient element")
dist.destroy_process_group()
