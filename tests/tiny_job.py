"""A training job that starts in seconds: `jobs.train` on a network of some thousand parameters, with faults on demand.

python -m mpi4py -m tests.tiny_job CONFIG.toml --set run.file=... [-- KEY=VALUE ...]

seconds=0.01   what a step takes at least
slow=RANK:SECONDS
               what a step of that rank takes at least
backward=0.01  what the last gradient of a backward pass takes
nan=RANK:STEP  a loss that is not finite
inf=RANK:STEP  one that is not either, with gradients that are
drift=RANK:STEP parameters that are no longer the other ranks'
SIGUSR1=RANK:STEP, SIGTERM=RANK:STEP
               a signal to that rank
raise=RANK:STEP an error of that rank alone
hang=RANK:STEP a rank that stands still
hang=RANK:build, hang=RANK:write, hang=RANK:close
               one that stands still while it builds, writes a checkpoint, or (rank 0) closes the run file
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from data.images.loader import Batch
from jobs.config.config import Config
from jobs.restart import files
from jobs.restart.signals import STOPPING, leave
from jobs.run.file import RunFile
from jobs.train.__main__ import main
from jobs.train.placement import Placement
from jobs.train.tasks.task import Score, Workload

FEATURES, CLASSES, STEPS_PER_EPOCH = 20, 10, 25


class Tiny(Workload[Batch]):
    """Gaussian clusters, batch norm and dropout: a Workload whose every kind of state matters."""

    steps_per_epoch = STEPS_PER_EPOCH

    def __init__(self, config: Config, rank: int, faults: dict[str, str]) -> None:
        torch.manual_seed(config.training.seed)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(FEATURES, 100),
            nn.BatchNorm1d(100),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(100, CLASSES),
        )
        self.network: nn.Module = self.model
        if "backward" in faults:
            first = next(self.model.parameters())
            first.register_hook(lambda gradient: time.sleep(float(faults["backward"])))
        torch.manual_seed(config.training.seed + rank)
        self._config, self._rank = config, rank
        self._seconds = float(faults.get("seconds", 0))
        slow, _, seconds = faults.get("slow", "").partition(":")
        if slow == str(rank):
            self._seconds = float(seconds)
        self._faults = faults
        if faults.get("hang") == f"{rank}:build":
            stand_still()
        self._centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES), np.float32)

    def move_to(self, placement: Placement) -> None:
        pass

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        for step in range(first_step, STEPS_PER_EPOCH):
            self._now = epoch * STEPS_PER_EPOCH + step + 1
            yield self._batch(epoch, step)

    def _batch(self, *place: int) -> Batch:
        random = np.random.default_rng([self._config.training.seed, self._rank, *place])
        labels = random.integers(CLASSES, size=self._config.training.batch_size)
        images = self._centres[labels] + random.standard_normal((len(labels), FEATURES), np.float32)
        return Batch(torch.from_numpy(images), torch.from_numpy(labels))

    def loss(self, batch: Batch) -> torch.Tensor:
        time.sleep(self._seconds)
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        if self._due("hang"):
            stand_still()
        if self._due("raise"):
            raise RuntimeError("the disk of this rank is on fire")
        for number in STOPPING:
            if self._due(number.name):
                os.kill(os.getpid(), number)
        if self._due("drift"):
            with torch.no_grad():
                next(self.model.parameters()).add_(1e-3)
        if self._due("inf"):
            loss = loss + float("inf")
        return loss * float("nan") if self._due("nan") else loss

    def _due(self, kind: str) -> bool:
        return self._faults.get(kind) == f"{self._rank}:{self._now}"

    def _counts(self, batch: Batch) -> NoReturn:
        raise NotImplementedError("the score is its own")

    def score(self) -> Score:
        self.model.eval()
        with torch.inference_mode():
            images, labels = self._batch(1 << 20, 0)
            logits = self.model(images)
        self.model.train()
        loss = float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return Score(loss, int((logits.argmax(dim=1) == labels).sum()), len(labels))


def stand_still(*ignored: object) -> NoReturn:
    while True:
        time.sleep(1)


def run(words: list[str], comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Train with the faults among the words; collective. The exit status."""
    split = words.index("--") if "--" in words else len(words)
    faults = dict(word.split("=") for word in words[split + 1 :])
    if faults.get("hang") == f"{comm.rank}:write":
        files.write_part = stand_still  # type: ignore[assignment]
    if faults.get("hang") == f"{comm.rank}:close":
        RunFile.close = stand_still  # type: ignore[assignment]

    def build(config: Config, *, rank: int, size: int) -> Workload:
        return Tiny(config, rank, faults)

    return main(words[:split], comm=comm, build=build)


if __name__ == "__main__":
    leave(run(sys.argv[1:]))
