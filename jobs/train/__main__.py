"""Train a network on many ranks.

    mpiexec -n 4 python -m mpi4py -m jobs.train CONFIG.toml [--set section.key=value ...]

Every rank computes the gradient of its own batches; oktopk reduces it, and all ranks take the same step.
Rank 0 shows a progress bar and writes the run file.

A run that was interrupted continues from its last checkpoint when it is started again. SIGUSR1 and SIGTERM on any rank
take one and stop all of them at the same step.

Exit status: 0, also when the run was complete already; 1 when gradients or losses ceased to be finite, parameters differed
between ranks or a checkpoint could not be written; 2 when what was asked for cannot be done, with one message and before any
training; 75 after a signal, with a checkpoint to continue from.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from mpi4py import MPI

from data.prepared_file import data_checksum
from jobs.cluster.rank_check import launch_problem
from jobs.config.config import Config
from jobs.config.file import ConfigError, apply_overrides, read_toml, validate
from jobs.restart.checkpoint import CheckpointError
from jobs.restart.session import Resumed, Session
from jobs.restart.signals import EXIT_STATUS, Interrupted, leave, show_when_asked
from jobs.restart.watchdog import Watchdog
from jobs.run import provenance
from jobs.run.file import RunFile, RunFileError, RunInfo
from jobs.run.gradient_file import GradientFileError, GradientRecorder, check_recordable, steps_recorded
from jobs.train.agreement import NonFiniteLossError, RanksDiverged, Refused, decide_on_root, decide_together
from jobs.train.loop import TrainingLoop
from jobs.train.setup import Build, Setup, set_up
from jobs.train.tasks.build import build_workload
from oktopk import NonFiniteGradientError
from oktopk.settings import entries_kept

FAULTS = (Refused, NonFiniteGradientError, NonFiniteLossError, RanksDiverged, CheckpointError)
"""What ends a run before its end; raised on every rank alike."""


def main(
    argv: Sequence[str] | None = None, *, comm: MPI.Intracomm = MPI.COMM_WORLD, build: Build = build_workload
) -> int:
    """Train as the command line says; collective.

    Args:
        argv: default the process's own. Read on rank 0 only.
        comm: the ranks that train together.
        build: makes each rank's workload.

    Returns:
        The exit status, the same on all ranks. Finalize MPI before leaving with another than 0: else mpi4py's
        runner aborts the job.
    """
    show_when_asked()
    options = comm.bcast(_parse(argv) if comm.rank == 0 else None)
    if isinstance(options, int):
        return options
    try:
        check_launch(comm, os.environ)
        document = decide_on_root(
            comm, lambda: apply_overrides(read_toml(options.config), options.overrides), (ConfigError,)
        )
        config = decide_together(comm, lambda: validate(document), (ConfigError,))
        train(config, comm, build)
    except Refused as refusal:
        _say(comm, f"jobs.train: {refusal}")
        return 2
    except NonFiniteGradientError as error:
        _say(comm, f"jobs.train: {error}: try a smaller optimizer.lr, or reduction.nonfinite=skip")
        return 1
    except NonFiniteLossError as error:
        _say(comm, f"jobs.train: {error}: try a smaller optimizer.lr")
        return 1
    except (CheckpointError, RanksDiverged) as error:
        _say(comm, f"jobs.train: {error}")
        return 1
    except Interrupted as leaving:
        how = "with a checkpoint" if config.checkpoint.enabled else "without a checkpoint"
        _say(comm, f"jobs.train: {leaving.signal_name}: stopped after step {leaving.step} {how}")
        return EXIT_STATUS if config.checkpoint.enabled else 128 + leaving.signal_number
    if comm.rank == 0 and (mark := os.environ.get("OKTOPK_ENDED")):
        Path(mark).touch()  # for jobs/cluster/batch.sh, whose launcher's word does not do
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace | int:
    parser = argparse.ArgumentParser(
        prog="mpiexec -n RANKS python -m mpi4py -m jobs.train",
        description="Train a network on many ranks, gradients reduced by oktopk.",
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="section.key=value",
        nargs="+",
        action="extend",
        default=[],
        help="override keys of the configuration",
    )
    try:
        return parser.parse_args(argv)
    except SystemExit as leaving:
        # Printed already. The other ranks must hear of it, so it must not leave from here.
        return leaving.code if isinstance(leaving.code, int) else 0


def _say(comm: MPI.Intracomm, message: str) -> None:
    if comm.rank == 0:
        print(message, file=sys.stderr, flush=True)


def check_launch(comm: MPI.Intracomm, environ: Mapping[str, str]) -> None:
    """Refuse to run as many jobs of one rank each, which is what a launcher of another MPI makes of a job; collective.

    Raises:
        Refused: on every rank: the launcher started another number of ranks than this MPI knows of.
    """
    problem = comm.bcast(launch_problem(MPI.COMM_WORLD.size, environ) if comm.rank == 0 else None)
    if problem:
        raise Refused(problem)


def train(config: Config, comm: MPI.Intracomm, build: Build) -> None:
    """Train from the first step, or from the last checkpoint, to the last step; collective.

    Raises:
        Refused: on every rank and before training: data, a run file or checkpoints that cannot be used.
        Interrupted: on every rank: a signal asked to stop.
        NonFiniteGradientError: on every rank, when reduction.nonfinite is "raise".
        NonFiniteLossError: on every rank, likewise, or of held-out data.
        CheckpointError: on every rank.
        RanksDiverged: on every rank: their parameters are no longer the same.
    """
    torch.set_num_threads(config.training.threads)
    watchdog = Watchdog(
        comm, step=config.run.watchdog, around=config.run.watchdog_around, together=(*FAULTS, Interrupted)
    )
    with watchdog, Session(config, comm) as session:
        if session.complete:
            _say(comm, f"jobs.train: {config.run.file} is complete: nothing to do")
            return
        setup = set_up(config, comm, build)
        resumed = session.resume(setup.workload.model, setup.optimizer)
        check_gradient_file(config, comm, resumed.continues)
        with (
            open_run_file(setup, session, resumed) as file,
            open_gradient_file(config, comm, setup.optimizer.length, resumed.progress.done) as gradients,
            session.safeguard(resumed, watchdog) as safeguard,
        ):
            TrainingLoop(setup, file, gradients, resumed.progress, safeguard).run()
        setup.optimizer.close()


def check_gradient_file(config: Config, comm: MPI.Intracomm, continues: bool) -> None:
    """Before anything of the run is written: no recording of another one is in the way; collective. Raises Refused."""
    folder = config.run.record_gradients
    if folder and not config.run.overwrite and not continues:
        decide_together(comm, lambda: check_recordable(folder, comm.rank), (GradientFileError,))


def open_gradient_file(
    config: Config, comm: MPI.Intracomm, length: int, done: int
) -> AbstractContextManager[GradientRecorder | None]:
    """This rank's recording of gradients, None if there is nothing to record; collective. Raises Refused.

    Args:
        done: steps that the run has behind it: the recording keeps as many, and goes on from there.
    """
    folder, steps = config.run.record_gradients, config.run.record_steps
    kept = min(done, steps)
    if folder and comm.allreduce(steps_recorded(folder, comm.rank, comm.size, length), MPI.MIN) < kept:
        _say(
            comm,
            f"jobs.train: {folder} does not hold the gradients of steps 1 to {kept}: begins again with {done + 1}",
        )
        kept = 0
    if not folder or kept == steps:
        return nullcontext()

    def create() -> GradientRecorder:
        return GradientRecorder(
            folder,
            comm.rank,
            comm.size,
            length,
            steps=steps,
            source=f"{config.model.description} on {config.data.name}",
            overwrite=True,
            kept=kept,
        )

    return decide_together(comm, create, (GradientFileError,))


def open_run_file(setup: Setup, session: Session, resumed: Resumed) -> AbstractContextManager[RunFile | None]:
    """The run file on rank 0, None elsewhere; collective. Raises Refused."""
    config, comm, length = setup.config, setup.comm, setup.optimizer.length
    created: list[RunFile] = []

    def create() -> None:
        info = RunInfo(
            config=config.to_json(),
            versions=provenance.versions_json(device=setup.placement.description),
            method=config.reduction.method,
            ranks=comm.size,
            length=length,
            k=entries_kept(config.reduction.density, length),
            batch_size=config.training.batch_size,
            seed=config.training.seed,
            host=provenance.host(),
            commit=config.run.commit or provenance.commit(),
            started=provenance.now(),
            hardware=provenance.hardware_json(),
            command=provenance.command(),
            job=provenance.job(),
            data=data_checksum(config.data.path),
        )
        created.append(session.create_run_file(info, resumed))

    decide_on_root(comm, create, (RunFileError, OSError))
    return created[0] if created else nullcontext()


if __name__ == "__main__":
    leave(main())
