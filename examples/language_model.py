"""A language model under AdamW, of the bytes of a large file, sparsely or --dense.

torchrun --nproc-per-node 4 examples/language_model.py FILE [--dense] [--steps 3000] ...

Both ways take the same batches. Sparsely each rank clips its own gradient, densely their mean. A small file is soon
memorised: 3,000 steps draw 98 MB. For the bytes of docs/results/updates.md wrap the optimizer with wire="int4", too.
"""

import argparse
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel

from oktopk import DistributedOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("--dense", action="store_true")
for name, default in {"steps": 3000, "layers": 6, "hidden": 384, "length": 512, "batch": 64}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--rate", type=float, default=2e-3)
args = parser.parse_args()


class GPT(nn.Module):
    """Each byte from those before it. Their embedding decodes, too."""

    def __init__(self) -> None:
        super().__init__()
        hidden = args.hidden
        self.bytes, self.places = nn.Embedding(256, hidden), nn.Embedding(args.length, hidden)
        shape: tuple = (hidden, max(1, hidden // 64), 4 * hidden, 0.0, "gelu")
        more = {"batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(*shape, **more) for _ in range(args.layers))
        self.norm = nn.LayerNorm(hidden)
        for each in (self.bytes, self.places):
            nn.init.normal_(each.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(text) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(args.length, device=text.device)
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return linear(self.norm(hidden), self.bytes.weight)


cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu", int(os.environ["LOCAL_RANK"]) if cuda else 0)
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
ranks = dist.get_world_size()
torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
text = torch.frombuffer(bytearray(Path(args.file).read_bytes()), dtype=torch.uint8)
text, held = text[: -len(text) // 50], text[-len(text) // 50 :]  # the last 50th is held out
if len(held) <= args.length or args.batch < ranks:
    parser.error("give each rank a sequence of a batch, and a file of 51 sequences at least")

torch.manual_seed(0)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1)
if args.dense:
    model = DistributedDataParallel(model)
else:
    optimizer = DistributedOptimizer(optimizer, density=0.01)  # this is it


def rate_at(step: int) -> float:
    """Up over a twentieth of the run, then down to a tenth."""
    return min(1, 20 * (step + 1) / args.steps) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))


def loss_of(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The mean loss of this rank's part of a batch."""
    at = torch.randint(len(text) - args.length, (args.batch // ranks, 1), generator=generator)
    batch = text[at + torch.arange(args.length + 1)].long().to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
        scores = model(batch[:, :-1])
    return cross_entropy(scores.float().flatten(0, 1), batch[:, 1:].flatten())


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
drawn = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has batches of its own
for step in range(args.steps):
    optimizer.zero_grad()
    loss = loss_of(text, drawn)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if (step + 1) % max(1, args.steps // 4) == 0:
        same = torch.Generator().manual_seed(1000 + dist.get_rank())
        with torch.no_grad(), nullcontext() if args.dense else optimizer.agreed():
            mean = sum(loss_of(held, same) for _ in range(8)) / 8
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            sent = "" if args.dense else f", {optimizer.report.bytes} bytes sent in the step"
            print(f"step {step + 1}: held-out loss {mean.item() / ranks:.3f}{sent}", flush=True)
if not args.dense:
    optimizer.close()
dist.destroy_process_group()
