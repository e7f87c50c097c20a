"""Measures the runs of the bench on the ranks of an mpiexec."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI
from tqdm import tqdm

from collectives.cuda.environment import gpu_problem
from collectives.dense_allreduce import dense_words
from collectives.traffic import lower_bound, step_limit, upper_bound
from data.command import show
from jobs.bench.device import Device
from jobs.bench.document import BASELINES, HOST_ROWS, NCCL_ROWS, BenchError, Output, document
from jobs.bench.libraries import MpiAllreduce, NcclAllreduce, leave_nccl, torch_problem
from jobs.bench.measure import Contestant, Course, Reducer, measure
from jobs.bench.options import OVER_MPI, Options, parse, parser
from jobs.bench.summary import summarize
from jobs.bench.tables import cells_table, document_tables
from jobs.cluster.agreement import check_launch, decide_on_root, decide_together, require, say
from oktopk import METHODS, GradientAllreduce, NonFiniteGradientError
from oktopk.settings import entries_kept


def contestant(name: str) -> Contestant:
    """Who takes part under a name of KNOWN."""
    method = "oktopk" if name == OVER_MPI or name in HOST_ROWS else name
    return Contestant(
        name=name,
        method=method,
        settings=dict(HOST_ROWS.get(name, {})),
        arguments={"peer_memory": False} if name == OVER_MPI else {},
        sparse=method in METHODS and METHODS[method].sparse,
        counted=name not in ("mpi", *NCCL_ROWS),
    )


def takes_part(
    everyone: Sequence[Contestant], device: Device, comm: MPI.Intracomm
) -> tuple[list[Contestant], dict[str, str]]:
    """Those who can take part here, and why the others cannot: name -> reason. Collective.

    Raises:
        BenchError: a row needs something that is not installed, or nobody is left; on every rank alike.
    """
    left_out: dict[str, str] = {}
    sharers = comm.allreduce(device.sharers, MPI.MAX)
    wanted = [one for one in everyone if one.name in NCCL_ROWS]
    if wanted and sharers == 1:
        require(comm, torch_problem, BenchError)
    for one in wanted:
        if sharers > 1:
            left_out[one.name] = f"NCCL takes one rank per GPU, and here {sharers} share one"
    present = [one for one in everyone if one.name not in left_out]
    if not present:
        raise BenchError("; ".join(f"{name} is left out: {reason}" for name, reason in left_out.items()))
    return present, left_out


def make_reducer(
    contestant: Contestant, options: Options, length: int, device: Device, comm: MPI.Intracomm
) -> Reducer:
    """What is measured under a name. Collective.

    Raises:
        BenchError, ValueError: it cannot be made; on every rank alike.
    """
    if contestant.method == "mpi":
        return MpiAllreduce(comm, length)
    if contestant.method in NCCL_ROWS:
        return NcclAllreduce(comm, length, contestant.method)
    settings: dict[str, Any] = {**options.settings, **contestant.settings, "density": options.density}
    if not METHODS[contestant.method].coded:
        settings.pop("wire", None)
    arguments = dict(contestant.arguments)
    if settings.get("levels") == "hosts" and comm.allreduce(device.sharers, MPI.MAX) > 1:
        arguments.setdefault("peer_memory", True)  # else ranks that share a GPU are refused
    return GradientAllreduce(
        comm,
        length,
        contestant.method,
        device=device.name,
        gradient_type=options.gradient_type,
        **arguments,
        **settings,
    )


FAULTS = (BenchError, ValueError, OSError, MemoryError)
"""What ends a bench with a message where it happens before the first step."""


def measure_run(options: Options, comm: MPI.Intracomm, everyone: Sequence[Contestant] = ()) -> dict[str, Any]:
    """The run as it stands in the document; on rank 0. Collective.

    Args:
        everyone: who takes part; none: those of the options' methods.

    Raises:
        BenchError: it cannot be done; on every rank alike.
    """
    device = open_device(options.device, options.gradient_type, comm)
    try:
        everyone = everyone or [contestant(name) for name in options.methods]
        present, left_out = takes_part(everyone, device, comm)
        return _measure(options, comm, device, present, left_out)
    finally:
        device.release()


def _measure(
    options: Options, comm: MPI.Intracomm, device: Device, present: list[Contestant], left_out: dict[str, str]
) -> dict[str, Any]:
    length = options.length
    source = decide_together(
        comm, lambda: device.source(options.gradients, length, comm.rank, options.seed), FAULTS, BenchError
    )
    k = entries_kept(options.density, length)
    exchange = options.settings.get("exchange", "direct")
    try:
        reducers = [(one, make_reducer(one, options, length, device, comm)) for one in present]
    except ValueError as error:  # raised on every rank alike; anything else ends the job
        raise BenchError(str(error)) from error
    course = Course(options.warmup, options.steps, options.dense_steps)
    with tqdm(
        total=course.warmup + course.steps,
        desc=f"bench, {comm.size} ranks",
        unit="step",
        disable=comm.rank != 0 or options.quiet,
        ncols=100,
        mininterval=1.0,
    ) as bar:
        samples = measure(comm, reducers, source, device, course, bar.update)
    for _, reducer in reducers:
        reducer.close()
    return {
        "ranks": comm.size,
        "length": length,
        "density": options.density,
        "k": k,
        "device": options.device,
        "gradient_type": options.gradient_type,
        "baseline": BASELINES[options.gradient_type] if options.device == "cuda" else None,
        "ranks_per_device": device.sharers,
        "left_out": left_out,
        "network": options.network,
        "gradients": source.describe(),
        "settings": options.settings,
        "course": vars(course),
        "bounds": {
            "lower": lower_bound(k, comm.size),
            "upper": upper_bound(k, comm.size, exchange),
            "step_limit": step_limit(k, comm.size, exchange),
            "dense": dense_words(length, comm.size),
        },
        "methods": [summarize(one, samples[one.name], length) for one in present if one.name in samples],
    }


def open_device(name: str, gradient_type: str, comm: MPI.Intracomm) -> Device:
    """The device of this rank. Collective.

    Raises:
        BenchError: some rank has none; on every rank alike.
    """
    if name == "cpu":
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        sharers = node.size
        node.Free()
        return Device(sharers)
    require(comm, lambda: _with_option(no_gpu()), BenchError)
    from jobs.bench.gpu.device import open_cuda  # CuPy

    # the first call that makes a context comes after each rank has its GPU
    device = open_cuda(gradient_type, comm)
    require(comm, lambda: _with_option(gpu_problem()), BenchError)
    return device


def no_gpu() -> str:
    """Why there is no GPU for this process, and what to do; "" if there is one. Makes no context on any."""
    try:
        import cupy

        there = cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # whatever it was, gpu_problem names it
        there = False
    return "" if there else gpu_problem()


def _with_option(problem: str) -> str:
    return problem and f"--device cuda cannot be used: {problem}"


def main(argv: Sequence[str] | None = None, comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Measure what rank 0's command line asks for; collective. Returns the exit status, the same on all ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    if comm.bcast(bool({"-h", "--help"} & {*words})):
        say(comm, parser().format_help(), sys.stdout)
        return 0
    try:
        options = decide_on_root(comm, lambda: parse(words), (BenchError,), BenchError)
    except BenchError as error:
        say(comm, f"jobs.bench: {error}")
        return 2
    each = [dataclasses.replace(options, lengths=(length,)) for length in options.lengths]
    status = run_all(lambda: ("bench", [partial(measure_run, own, comm) for own in each]), options, comm)
    leave_nccl()  # not after an exception: a rank that is alone would wait for the others
    return status


Measure = Callable[[], dict[str, Any]]
"""Measures one run, collectively, and returns it as it stands in the document, on rank 0."""


def run_all(todo: Callable[[], tuple[str, Sequence[Measure]]], options: Options, comm: MPI.Intracomm) -> int:
    """Measure runs, print their tables and write the document, for the bench and for scripts beside results. Collective.

    Args:
        todo: gives the kind of the document, and its runs; may raise BenchError on every rank alike.
        options: of these json, quiet, commit, device and module are read.

    Returns:
        The exit status, the same on all ranks: 0, or 2 with one message.
    """
    path, output = options.json, None
    try:
        check_launch(comm, raises=BenchError)
        if path is not None:
            output = decide_on_root(comm, lambda: Output(path), FAULTS, BenchError)
        kind, measures = todo()
        runs: list[dict[str, Any]] = []
        for measure_one in measures:
            began = time.monotonic()
            result = measure_one()
            if comm.rank != 0:
                continue
            runs.append({**result, "seconds_taken": time.monotonic() - began})
            content = document(kind, runs, comm.size, options.module, options.commit)
            content["cells"] = len(measures)
            if options.device == "cuda":
                from jobs.bench.gpu.device import gpu_facts

                content["gpu"] = gpu_facts()
            if not options.quiet:
                show("\n" * (len(runs) > 1) + document_tables(content | {"runs": runs[-1:]}), flush=True)
            if output is not None:
                output.write(content)  # after each, so that what is done stays when the job is cut off
        if kind == "gpu table" and len(runs) > 1 and not options.quiet:
            show(f"\n{cells_table({'runs': runs}).terminal()}", flush=True)
    except (BenchError, NonFiniteGradientError) as error:
        say(comm, f"{options.module}: {error}")
        return 2
    return 0
