"""Runs one job of a training run: set-up, resume, guarded steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from mpi4py import MPI

from data.prepared_file import data_checksum
from jobs.cluster.agreement import Refused, decide_on_root, say
from jobs.config.config import Config
from jobs.config.modes import row_of
from jobs.restart.checkpoint import CheckpointError
from jobs.restart.session import Session
from jobs.restart.signals import Interrupted, Watchdog
from jobs.restart.state import Progress
from jobs.run import provenance
from jobs.run.file import RunFile, RunFileError, RunInfo
from jobs.train.agreement import NonFiniteLossError, RanksDiverged
from jobs.train.loop import TrainingLoop
from jobs.train.setup import Build, Setup, set_up
from oktopk import NonFiniteGradientError
from oktopk.settings import entries_kept

FAULTS = (Refused, NonFiniteGradientError, NonFiniteLossError, RanksDiverged, CheckpointError, RunFileError)
"""What ends a run before its end; raised on every rank alike."""


def train(config: Config, comm: MPI.Intracomm, build: Build) -> None:
    """Train from the first step, or from the last checkpoint, to the last step; collective.

    Raises:
        Refused: on every rank and before training: data, a run file or checkpoints that cannot be used.
        Interrupted: on every rank: a signal asked to stop.
        NonFiniteGradientError: on every rank, when reduction.nonfinite is "raise".
        NonFiniteLossError: on every rank, likewise, or of held-out data.
        CheckpointError, RunFileError: on every rank: it could not be written.
        RanksDiverged: on every rank: their parameters are no longer the same.
    """
    torch.set_num_threads(config.training.threads)
    watchdog = Watchdog(
        comm, step=config.run.watchdog, around=config.run.watchdog_around, together=(*FAULTS, Interrupted)
    )
    with watchdog, Session(config, comm) as session:
        if session.complete:
            say(comm, f"jobs.train: {config.run.file} is complete: nothing to do")
            return
        setup = set_up(config, comm, build)
        progress = session.resume(setup.workload.model, setup.optimizer)
        with (
            open_run_file(setup, session, progress) as file,
            session.checkpointer(progress, watchdog) as checkpointer,
        ):
            TrainingLoop(setup, file, progress, checkpointer).run()
        setup.optimizer.close()


@contextmanager
def open_run_file(setup: Setup, session: Session, progress: Progress) -> Iterator[RunFile | None]:
    """The run file on rank 0, None elsewhere, closed with how the block ended; collective.

    Raises:
        Refused: on every rank: it cannot be created.
        RunFileError: on every rank: its end cannot be written.
    """
    config, comm, length = setup.config, setup.comm, setup.optimizer.length
    created: list[RunFile] = []

    def create() -> None:
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        info = RunInfo(
            config=config.to_json(),
            versions=json.dumps(
                provenance.versions()
                | {"mpi": provenance.mpi_library(), "device": setup.placement.description}
            ),
            method=row_of(config.reduction.method, config.reduction.overlap, config.reduction.sends),
            ranks=comm.size,
            length=length,
            k=entries_kept(config.reduction.density, length),
            batch_size=config.training.batch_size,
            seed=config.training.seed,
            host=provenance.host(),
            commit=config.run.commit or provenance.commit(),
            started=provenance.now(),
            # mpiexec may have bound this rank to one of the cores
            hardware=json.dumps(provenance.machine() | {"cores": os.cpu_count(), "gpus": gpus}),
            command=provenance.command(),
            job=provenance.job(),
            data=data_checksum(config.data.path),
        )
        created.append(session.create_run_file(info, progress))

    decide_on_root(comm, create, (RunFileError, OSError))
    file = created[0] if created else None
    with file or nullcontext():
        yield file
        decide_on_root(comm, lambda: file.close("complete") if file else None, (RunFileError,), RunFileError)
