"""Trains several runs of an experiment one after the other on the same ranks.

    mpiexec -n 4 python -m mpi4py -m jobs.experiment.worker PLAN.json OUTCOME.json

Starting Python, torch, MPI and a GPU on every rank takes longer than some of the runs, and the data set need be read
once. Rank 0 notes in OUTCOME.json what became of each.

Exit status: 0; 1 when a run failed that the others outlived; 75 after a signal, see jobs.train.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from data.durable import replaced
from jobs.cluster.agreement import decide_on_root, decide_together, say
from jobs.config.file import ConfigError, validate
from jobs.restart.signals import EXIT_STATUS, Interrupted, heed_again, leave
from jobs.restart.start import checkpoint_folder
from jobs.train.job import FAULTS, train
from jobs.train.reduce.process_group import stop_process_group
from jobs.train.setup import Build, build_workload
from jobs.train.tasks.images import load_images


@dataclass
class Outcome:
    """What became of the runs so far: a JSON file that is whole at any time. On rank 0.

    Attributes:
        current: name of the run at work, "" between runs.
        failed: name -> why, of runs that ended before their end.
        stopped: name of the run that a signal stopped, "" if all were done.
    """

    current: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str = ""

    def write(self, path: Path) -> None:
        with replaced(path) as draft:
            draft.write_text(json.dumps(vars(self)))


def main(argv: Sequence[str] | None = None, *, comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Train what the plan says; collective. Returns the exit status, the same on all ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    plan_path, outcome_path = (Path(word) for word in words)
    plan: dict[str, Any] = decide_on_root(comm, lambda: json.loads(plan_path.read_text()), (OSError,))
    outcome = Outcome()
    build = functools.partial(build_workload, load=functools.cache(load_images))
    status = 0
    for number, entry in enumerate(plan["trials"], start=1):
        outcome.current = name = entry["name"]
        if comm.rank == 0:
            outcome.write(outcome_path)
        say(comm, f"[{number}/{len(plan['trials'])}] {name}")
        try:
            _train(entry["document"], comm, build)
        except FAULTS as error:
            # of this run alone: the next one can be tried
            outcome.failed[name] = str(error)
            status = 1
        except Interrupted:
            outcome.stopped = name
            status = EXIT_STATUS
            break
        heed_again()
        _forget(comm)
    outcome.current = ""
    if comm.rank == 0:
        outcome.write(outcome_path)
    return status


def _train(document: dict[str, Any], comm: MPI.Intracomm, build: Build) -> None:
    """One run to its end, after which it needs no checkpoint; collective."""
    config = decide_together(comm, lambda: validate(document), (ConfigError,))
    train(config, comm, build)
    if comm.rank == 0:
        shutil.rmtree(checkpoint_folder(config), ignore_errors=True)


def _forget(comm: MPI.Intracomm) -> None:
    """Give the memory of the last run back before the next one asks for its own."""
    stop_process_group()  # of a run that failed before it closed
    # it keeps what it compiled, and gives up after some networks of one class
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if "cupy" in sys.modules:
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    comm.barrier()


if __name__ == "__main__":
    leave(main())
