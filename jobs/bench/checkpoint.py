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
from jobs.config.file import ConfigError, add_overrides, load
from jobs.config.sections import CheckpointConfig
from jobs.restart.checkpoint import Checkpointer, Due
from jobs.restart.files import Identity, list_sets, remove_sets
from jobs.restart.signals import leave
from jobs.restart.state import BatchStream, Position, capture, model_digest
from jobs.train.setup import set_up


def bench(config: Config, comm: MPI.Intracomm, folder: Path, *, steps: int, every: int) -> str:
    """Measure `steps` steps of each kind in blocks of `every`; collective. Returns the figures as text, of the slowest rank.

    Args:
        folder: for the checkpoints, on the file system that is to be measured.
    """
    torch.set_num_threads(config.training.threads)
    setup = set_up(config, comm)
    workload, optimizer, done = setup.workload, setup.optimizer, 0
    workload.model.train()
    batches = BatchStream(
        workload, config.training.batch_size * comm.size, Position(), workload.steps_per_epoch
    )
    identity = Identity(model_digest(workload.model), config.reduction.method, optimizer.length)
    checkpointer = Checkpointer(comm, folder, identity, {}, CheckpointConfig(every_minutes=0.0, keep=2))

    def block(count: int, save: bool) -> tuple[float, float]:
        """Seconds of some steps on the slowest rank, and those that training stood still to copy."""
        nonlocal done
        comm.barrier()
        copying, began = 0.0, time.perf_counter()
        for number in range(count):
            batch = next(batches)
            optimizer.zero_grad()
            workload.loss(batch).backward()
            optimizer.reduce()
            optimizer.apply()
            done += 1
            # as the safeguard of a run asks after every step
            if save and checkpointer.due(done, last=False) is Due.NOTHING and not number:
                before = time.perf_counter()
                checkpointer.save(done, *capture(workload.model, optimizer, batches.position))
                copying = time.perf_counter() - before
        if save:
            checkpointer.wait()
        comm.barrier()
        seconds = time.perf_counter() - began
        return comm.allreduce(seconds, MPI.MAX), comm.allreduce(copying, MPI.MAX)

    block(min(every, 10), save=True)  # compiles, and touches the memory of the copies
    times: dict[bool, list[float]] = {False: [], True: []}
    copies = []
    # every other pair the other way round, so that a machine that slows down does not count for one kind alone
    blocks = [bool(save ^ pair % 2) for pair in range(steps // every) for save in (False, True)]
    for save in tqdm(blocks, desc="blocks", disable=comm.rank != 0):
        seconds, copying = block(every, save)
        times[save].append(seconds / every)
        copies += [copying] * save
    set_bytes = sum(file.stat().st_size for file in list_sets(folder)[0].iterdir())
    checkpointer.close()
    optimizer.close()

    def spread(save: bool) -> str:
        mean, low, high = (1e3 * float(of(times[save])) for of in (np.mean, min, max))
        return f"{mean:,.2f} ms (blocks from {low:,.2f} to {high:,.2f})"

    cost = float(np.mean(times[True]) / np.mean(times[False])) - 1.0
    return "\n".join(
        (
            f"ranks                       {comm.size:,}",
            f"parameters                  {optimizer.length:,}",
            f"step without checkpoints    {spread(False)}",
            f"step with one every {every:<7} {spread(True)}",
            f"cost                        {cost:+.2%} of {len(copies) * every} steps",
            f"training stands still for   {1e3 * float(np.mean(copies)):,.2f} ms per checkpoint",
            f"a set                       {set_bytes / 1e6:,.1f} MB",
        )
    )


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
    add_overrides(parser, text)
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
    say(comm, figures, sys.stdout)
    return 0


if __name__ == "__main__":
    leave(main())
