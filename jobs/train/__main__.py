"""Train a network on many ranks.

    mpiexec -n 4 python -m mpi4py -m jobs.train CONFIG.toml [--set section.key=value ...]

Every rank computes the gradient of its own batches; oktopk reduces it, and all ranks take the same step.
Rank 0 shows a progress bar and writes the run file.

A run that was interrupted continues from its last checkpoint when it is started again. SIGUSR1 and SIGTERM on any rank
take one and stop all of them at the same step.

Exit status: 0, also when the run was complete already; 1 when gradients or losses ceased to be finite, parameters differed
between ranks, or a checkpoint or the run file could not be written; 2 when what was asked for cannot be done, with one message
and before any training; 75 after a signal, with a checkpoint to continue from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from mpi4py import MPI

from data.command import command_parser, show
from data.durable import create
from data.prepared_file import data_checksum
from jobs.cluster.agreement import Refused, check_launch, decide_on_root, say
from jobs.config.config import Config
from jobs.config.file import ConfigError, add_overrides, commented_toml, load, shown
from jobs.config.modes import row_of
from jobs.restart.checkpoint import CheckpointError
from jobs.restart.session import Session
from jobs.restart.signals import EXIT_STATUS, Interrupted, Watchdog, leave, show_when_asked
from jobs.restart.state import Progress
from jobs.run import provenance
from jobs.run.file import RunFile, RunFileError, RunInfo
from jobs.train.agreement import NonFiniteLossError, RanksDiverged
from jobs.train.loop import TrainingLoop
from jobs.train.setup import Build, Setup, build_workload, set_up
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


_ADVICE: dict[type[Exception], str] = {
    NonFiniteGradientError: ": try a smaller optimizer.lr, or reduction.nonfinite=skip",
    NonFiniteLossError: ": try a smaller optimizer.lr",
}


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
        check_launch(comm)
        config = decide_on_root(comm, lambda: load(options.config, options.overrides), (ConfigError,))
        train(config, comm, build)
    except Refused as refusal:
        say(comm, f"jobs.train: {refusal}")
        return 2
    except FAULTS as error:
        say(comm, f"jobs.train: {error}{_ADVICE.get(type(error), '')}")
        return 1
    except Interrupted as leaving:
        how = "with a checkpoint" if config.checkpoint.enabled else "without a checkpoint"
        say(comm, f"jobs.train: {leaving.signal_name}: stopped after step {leaving.step} {how}")
        return EXIT_STATUS if config.checkpoint.enabled else 128 + leaving.signal_number
    if comm.rank == 0 and (mark := os.environ.get("OKTOPK_ENDED")):
        os.close(create(Path(mark)))  # for jobs/cluster/batch.sh, whose launcher's word does not do
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace | int:
    parser = command_parser(
        "jobs.train",
        "Train a network on many ranks, gradients reduced by oktopk.",
        "mpiexec -n 4 python -m mpi4py -m jobs.train jobs/configs/digits.toml --set reduction.method=dense training.steps=100",
        "--show-config",
        program="mpiexec -n RANKS python -m mpi4py -m",
        further="A network of your own takes the place of model.name in CONFIG.toml: [model] factory =\n"
        "'my_package.my_module:build', and [model.arguments] hidden = 256 if it takes such a keyword. The callable returns a\n"
        "torch.nn.Module. data.name decides what is trained: images need logits[batch, classes];\n"
        "speech (an4) and text need what LSTM.forward and BERT.forward in models/ take and return.\n\n",
    )
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", nargs="?", help="Configuration of the run, as in jobs/configs")
    text = "Values of keys that replace those of the configuration; --show-config lists the keys"
    add_overrides(parser, text)
    text = "Print every key of the configuration with its meaning, type and default, as TOML, and leave. The values are those "
    add("--show-config", action="store_true", help=text + "of CONFIG.toml and --set where given")
    try:
        options = parser.parse_args(argv)
        if options.config is None and not options.show_config:
            parser.error("CONFIG.toml is missing")
        if not options.show_config:
            return options
        try:
            show(commented_toml(shown(options.config, options.overrides)))
        except ConfigError as error:
            show(f"jobs.train: {error}", file=sys.stderr)
            return 2
        return 0
    except SystemExit as leaving:
        # Printed already. The other ranks must hear of it, so it must not leave from here.
        return leaving.code if isinstance(leaving.code, int) else 0


if __name__ == "__main__":
    leave(main())
