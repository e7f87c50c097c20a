"""What checkpoints cost: blocks of steps with and without one, in turns, on the slowest rank (docs/cluster.md has the table).

    python -m jobs.launch -n 4 -m docs.results.checkpoints jobs/configs/digits.toml --set model.width=1.0

A block with a checkpoint takes it after its first step and ends when it is valid, so that all of its cost, the copy as well as
the writing behind the steps, falls into that block and none into the next.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from jobs.cluster.agreement import Refused, decide_on_root, say
from jobs.config.file import ConfigError, add_overrides, load
from jobs.config.sections import CheckpointConfig
from jobs.restart.checkpoint import Checkpointer
from jobs.restart.files import list_sets
from jobs.restart.signals import SignalNote, Watchdog, leave
from jobs.restart.state import Position, capture, model_digest
from jobs.train.loop import BatchStream
from jobs.train.setup import set_up


def main(comm=MPI.COMM_WORLD):
    """Measure as the command line says; returns the exit status. Collective."""
    parser = argparse.ArgumentParser(prog="python -m jobs.launch -n RANKS -m docs.results.checkpoints")
    parser.add_argument("config", help="configuration of the training run")
    add_overrides(parser, "values of keys that replace those of the configuration")
    parser.add_argument("--steps", type=int, default=200, help="of each kind; default: %(default)s")
    parser.add_argument("--every", type=int, default=50, help="steps per checkpoint; default: %(default)s")
    parser.add_argument(
        "--folder", help="on the file system to be measured; default: that of temporary files"
    )
    options = parser.parse_args()
    if not 2 <= options.every <= options.steps:
        parser.error(f"--every {options.every} is not in [2, {options.steps}], the steps")
    try:
        config = decide_on_root(comm, lambda: load(options.config, options.overrides), (ConfigError,))
        torch.set_num_threads(config.training.threads)
        setup = set_up(config, comm)
    except Refused as refusal:
        say(comm, f"checkpoints: {refusal}")
        return 2
    workload, optimizer = setup.workload, setup.optimizer
    workload.model.train()
    batches = BatchStream(
        workload, config.training.batch_size * comm.size, Position(), workload.steps_per_epoch
    )
    about = {
        "model": model_digest(workload.model),
        "method": config.reduction.method,
        "length": optimizer.length,
        "config": {},
    }
    folder = tempfile.TemporaryDirectory(dir=options.folder) if comm.rank == 0 else None
    path = Path(comm.bcast(folder and folder.name))
    due = CheckpointConfig(every_minutes=0.0, keep=2)
    checkpointer = Checkpointer(comm, path, about, due, SignalNote(), Watchdog(comm, step=0.0, around=0.0))
    done, times, copies = 0, {False: [], True: []}, []
    # every other pair the other way round, so that a machine that slows down does not count for one kind alone
    kinds = [bool(save ^ pair % 2) for pair in range(options.steps // options.every) for save in (0, 1)]
    for number, save in enumerate([True, *kinds]):  # the first compiles, and touches the memory of the copies
        comm.barrier()
        copying, began = 0.0, time.perf_counter()
        for step in range(options.every):
            batch = next(batches)
            optimizer.zero_grad()
            workload.loss(batch).backward()
            optimizer.reduce()
            optimizer.apply()
            done += 1
            if save:
                checkpointer.due(done)  # as a run asks after every step
            if save and not step:
                before = time.perf_counter()
                checkpointer.save(done, *capture(workload.model, optimizer, batches.position))
                copying = time.perf_counter() - before
        if save:
            checkpointer.wait()
        comm.barrier()
        seconds, copying = np.max(comm.allgather([time.perf_counter() - began, copying]), axis=0)
        if number:
            times[save].append(1e3 * seconds / options.every)
            copies += [1e3 * copying] * save
    set_bytes = sum(file.stat().st_size for file in list_sets(path)[0].iterdir())
    checkpointer.close()
    optimizer.close()
    if comm.rank == 0:
        print(f"{comm.size} ranks, {optimizer.length:,} parameters, a set of {set_bytes / 1e6:,.1f} MB")
        for save, name in ((False, "without checkpoints"), (True, f"with one every {options.every}")):
            each = times[save]
            print(f"step {name}: {np.mean(each):,.2f} ms (blocks from {min(each):,.2f} to {max(each):,.2f})")
        cost = np.mean(times[True]) / np.mean(times[False]) - 1
        print(f"cost {cost:+.2%}; training stands still for {np.mean(copies):,.2f} ms per checkpoint")
        folder.cleanup()
    return 0


if __name__ == "__main__":
    leave(main())
