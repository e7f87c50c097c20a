"""Measures what checkpoints cost: alternating blocks of steps with and without them, in one run.

    python -m jobs.launch -n 4 -m jobs.bench.checkpoint jobs/configs/digits.toml --set model.width=1.0

Blocks of steps alternate. A block with checkpoints takes one after its first step and ends when it is valid, so that all of its
cost, the copy as well as the writing behind the steps, falls into that block and none into the next.

Exit status: 0; 2 when what was asked for cannot be done.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from tqdm import tqdm

from data.command import command_parser
from jobs.cluster.agreement import Refused, decide_on_root, say
from jobs.config.config import Config
from jobs.config.file import ConfigError, load
from jobs.restart.checkpoint import Checkpointer, Due, Interval
from jobs.restart.files import Identity, list_sets, remove_sets
from jobs.restart.signals import leave
from jobs.restart.state import BatchStream, Position, capture, model_digest
from jobs.train.setup import set_up


class CheckpointBench:
    """A run whose steps can be taken with and without checkpoints; collective.

    Args:
        config: of the run.
        comm: the ranks.
        folder: for the checkpoints, on the file system that is to be measured.
    """

    def __init__(self, config: Config, comm: MPI.Intracomm, folder: Path) -> None:
        torch.set_num_threads(config.training.threads)
        self.comm = comm
        setup = set_up(config, comm)
        self.workload, self.optimizer = setup.workload, setup.optimizer
        self.workload.model.train()
        self.batches = BatchStream(
            self.workload, config.training.batch_size * comm.size, Position(), self.workload.steps_per_epoch
        )
        identity = Identity(model_digest(self.workload.model), config.reduction.method, self.optimizer.length)
        self.checkpointer = Checkpointer(comm, folder, identity, {}, interval=Interval(), keep=2)
        self.done = 0

    def block(self, steps: int, *, save: bool) -> tuple[float, float]:
        """Take some steps; returns their seconds on the slowest rank, and those that training stood still to copy."""
        self.comm.barrier()
        copying = 0.0
        began = time.perf_counter()
        for number in range(steps):
            self._step()
            if not save:
                continue
            # as the safeguard of a run asks after every step
            assert self.checkpointer.due(self.done, last=False) is Due.NOTHING
            if not number:
                before = time.perf_counter()
                state = capture(self.workload.model, self.optimizer, self.batches.position)
                self.checkpointer.save(self.done, *state)
                copying = time.perf_counter() - before
        if save:
            self.checkpointer.wait()
        self.comm.barrier()
        seconds = time.perf_counter() - began
        return self.comm.allreduce(seconds, MPI.MAX), self.comm.allreduce(copying, MPI.MAX)

    def _step(self) -> None:
        batch = next(self.batches)
        self.optimizer.zero_grad()
        self.workload.loss(batch).backward()
        self.optimizer.reduce()
        self.optimizer.apply()
        self.done += 1

    def close(self) -> None:
        self.checkpointer.close()
        self.optimizer.close()


def bench(config: Config, comm: MPI.Intracomm, folder: Path, *, steps: int, every: int) -> dict[str, float]:
    """Measure `steps` steps of each kind in blocks of `every`.

    Returns:
        Single figures, equal on all ranks; seconds are of the slowest rank.
    """
    measured = CheckpointBench(config, comm, folder)
    measured.block(min(every, 10), save=True)  # compiles, and touches the memory of the copies
    times: dict[bool, list[float]] = {False: [], True: []}
    copies = []
    # every other pair the other way round, so that a machine that slows down does not count for one kind alone
    blocks = [bool(save ^ pair % 2) for pair in range(steps // every) for save in (False, True)]
    for save in tqdm(blocks, desc="blocks", disable=comm.rank != 0):
        seconds, copying = measured.block(every, save=save)
        times[save].append(seconds)
        if save:
            copies.append(copying)
    newest = list_sets(folder)[0]
    sizes = [file.stat().st_size for file in newest.iterdir()]
    measured.close()
    without, with_them = (float(np.sum(times[save])) / (len(times[save]) * every) for save in (False, True))
    return {
        "ranks": comm.size,
        "parameters": measured.optimizer.length,
        "steps": len(copies) * every,
        "every": every,
        **{
            f"{extreme.__name__}_{kind}": extreme(times[save]) / every
            for save, kind in ((False, "without"), (True, "with"))
            for extreme in (min, max)
        },
        "step_seconds_without": without,
        "step_seconds_with": with_them,
        "cost": with_them / without - 1.0,
        "copy_seconds": float(np.mean(copies)),
        "set_bytes": sum(sizes),
    }


def main(argv: Sequence[str] | None = None, *, comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Bench as the command line says; collective. Returns the exit status, the same on all ranks."""
    parser = command_parser(
        "jobs.bench.checkpoint",
        "Time steps of a training run with and without checkpoints, in alternating blocks of one run.",
        "python -m jobs.launch -n 4 -m jobs.bench.checkpoint jobs/configs/digits.toml --set model.width=1.0",
        program="python -m jobs.launch -n RANKS -m",
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="Configuration of the training run")
    text = "Values of keys that replace those of the configuration"
    add("--set", dest="overrides", metavar="section.key=value", nargs="+", default=[], help=text)
    text = "Steps with checkpoints, and as many without, at least --every; default: %(default)s"
    add("--steps", type=int, default=200, help=text)
    add("--every", type=int, default=50, help="Steps per checkpoint, at least 2; default: %(default)s")
    text = "Folder that checkpoints are written in and removed from; default: that of temporary files"
    add("--folder", type=Path, metavar="DIR", help=text)
    options = parser.parse_args(argv)
    if not 2 <= options.every <= options.steps:
        parser.error(f"--every {options.every} is not in [2, {options.steps}], the steps")
    try:
        config = decide_on_root(comm, lambda: load(options.config, options.overrides), (ConfigError,))
        created = tempfile.mkdtemp(dir=options.folder) if comm.rank == 0 else ""
        folder = Path(comm.bcast(created))
        try:
            figures = bench(config, comm, folder, steps=options.steps, every=options.every)
        finally:
            if comm.rank == 0:
                remove_sets(folder)
                folder.rmdir()
    except Refused as refusal:
        say(comm, f"jobs.bench.checkpoint: {refusal}")
        return 2
    say(comm, table(figures), sys.stdout)
    return 0


def table(figures: dict[str, float]) -> str:
    """The figures as text."""
    return "\n".join(
        (
            f"ranks                       {figures['ranks']:,}",
            f"parameters                  {figures['parameters']:,}",
            f"step without checkpoints    {_spread(figures, 'without')}",
            f"step with one every {figures['every']:<7} {_spread(figures, 'with')}",
            f"cost                        {figures['cost']:+.2%} of {figures['steps']} steps",
            f"training stands still for   {figures['copy_seconds'] * 1e3:,.2f} ms per checkpoint",
            f"a set                       {figures['set_bytes'] / 1e6:,.1f} MB",
        )
    )


def _spread(figures: dict[str, float], kind: str) -> str:
    mean, low, high = (1e3 * figures[f"{name}_{kind}"] for name in ("step_seconds", "min", "max"))
    return f"{mean:,.2f} ms (blocks from {low:,.2f} to {high:,.2f})"


if __name__ == "__main__":
    leave(main())
