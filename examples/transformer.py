"""One's own loop: a small transformer predicts the next letter. mpiexec -n 2 python -m mpi4py examples/transformer.py."""

import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

LENGTH = 32
TEXT = "sphinx of black quartz, judge my vow; pack my box with five dozen liquor jugs. " * 8
LETTERS = sorted(set(TEXT))


class Transformer(nn.Module):
    """One causal layer over letters and places."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), 64), nn.Embedding(LENGTH, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.scores = nn.Linear(64, len(LETTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.scores(self.layer(self.letters(text) + self.places.weight, mask, is_causal=True))


torch.manual_seed(0)  # equal parameters on all ranks; else they become rank 0's, with a warning
model, text = Transformer(), torch.tensor([LETTERS.index(letter) for letter in TEXT])
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), density=0.05)
drawn = torch.Generator().manual_seed(1 + MPI.COMM_WORLD.rank)  # every rank has batches of its own
for step in range(60):
    batch = text[torch.randint(len(text) - LENGTH, (8, 1), generator=drawn) + torch.arange(LENGTH + 1)]
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if MPI.COMM_WORLD.rank == 0 and step % 59 == 0:
        print(f"step {step}: loss {loss:.3f}, {optimizer.report.words} words sent for n = {optimizer.length}")
