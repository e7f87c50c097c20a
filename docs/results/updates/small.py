"""A small network under SGD with momentum: oktopk-run -n 4 docs/results/updates/small.py."""

from itertools import product

import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer

WAYS = {
    "dense": {"method": "dense"},
    "gradients 1 %": {"sends": "gradients", "density": 0.01},
    "updates 1 %": {"sends": "updates", "method": "oktopk", "density": 0.01},
}


def data(count, seed):
    """Inputs, and the label that a network with fixed weights gives each."""
    fixed, drawn = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    first, second = torch.randn(64, 128, generator=fixed), torch.randn(128, 10, generator=fixed)
    inputs = torch.randn(count, 64, generator=drawn)
    return inputs, (torch.tanh(inputs @ first / 8) @ second).argmax(1)


def main():
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    held, labels = data(4000, 12345)
    for name, settings in WAYS.items():
        for rate, seed in product((0.0125, 0.025, 0.05, 0.1), range(3)):
            torch.manual_seed(seed)
            widths = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
            model = nn.Sequential(*widths)
            sgd = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
            optimizer = DistributedOptimizer(sgd, **settings)
            for step in range(200):
                inputs, wanted = data(32, 1_000_000 * seed + 1000 * step + comm.rank + 7)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), wanted).backward()
                optimizer.step()
            with optimizer.agreed(), torch.no_grad():
                scores = model(held)
            right = (scores.argmax(1) == labels).float().mean()
            if comm.rank == 0:
                loss = nn.functional.cross_entropy(scores, labels)
                print(f"{name}, rate {rate}, seed {seed}: loss {loss:.3f}, accuracy {right:.1%}", flush=True)
            optimizer.close()


if __name__ == "__main__":
    main()
