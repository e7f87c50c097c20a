"""What the doctor tries in processes of its own, so that a crash or a hang there is a finding and no more.

    python -m oktopk.doctor.probe gpus FILE                            one process; also mpi, cpu
    mpiexec -n 2 python -m mpi4py -m oktopk.doctor.probe host FILE     also device, peer
    torchrun --nproc-per-node 2 -m oktopk.doctor.probe host FILE       as well, without MPI

Every process writes what it found as JSON: into FILE.0, and FILE.1.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oktopk.launch import library_problem

LENGTH = 2**24
"""Elements of a gradient of 64 MiB."""
_SEEDS = (20220402, 20220406)
_NOT_TWO = (
    "the launcher started processes that see {} of each other, not 2: its MPI is not mpi4py's "
    "(under Slurm try srun --mpi=pmix or --mpi=pmi2; srun --mpi=list)"
)
_DEADLINE = 300  # seconds after which a process that nobody ends, ends itself


def gpus() -> dict[str, Any]:
    """The GPUs, which pairs have no peer access, and whether our kernels compile for them."""
    from collectives.cuda.environment import driver_version, first_line, gpu_problem
    from oktopk.devices import GRADIENT_TYPES, make_backend

    if problem := gpu_problem():
        return {"problem": problem}
    import cupy

    runtime = cupy.cuda.runtime
    numbers = range(runtime.getDeviceCount())
    devices = [_described(runtime.getDeviceProperties(number)) for number in numbers]
    pairs = [(one, other) for one in numbers for other in numbers if one != other]
    denied = [f"{one}-{other}" for one, other in pairs if not runtime.deviceCanAccessPeer(one, other)]
    result: dict[str, Any] = {"problem": "", "devices": devices, "no_access": denied}
    result |= {"driver": driver_version(), "runtime": runtime.runtimeGetVersion()}
    try:
        for gradient_type in GRADIENT_TYPES["cuda"]:
            make_backend("cuda", gradient_type, None)
    except (RuntimeError, MemoryError) as error:
        result["problem"] = first_line(error)
    return result


def _described(properties: dict[str, Any]) -> str:
    name, gibibytes = properties["name"], properties["totalGlobalMem"] / 2**30
    text = name.decode() if isinstance(name, bytes) else name
    capability = f"{properties['major']}.{properties['minor']}"
    return f"{text}, {gibibytes:.0f} GiB, compute capability {capability}"


def mpi() -> dict[str, Any]:
    """Whether there is an MPI library. Does not start it."""
    return {"problem": library_problem()}


def cpu() -> dict[str, Any]:
    """Compiles the kernels of CPU ranks into Numba's cache."""
    from collectives.cpu.compiled import cache_problem
    from oktopk.cpu import compile_kernels

    if uncached := cache_problem():
        return {"problem": f"compiled code is not kept: {uncached}"}
    return {"problem": "", "compiled": compile_kernels()}


def sums(comm: Any, device: str, peer_memory: bool | None) -> dict[str, Any]:
    """Sums of two gradients by the library, compared bit by bit, then timed.

    Args:
        comm: of two ranks. Collective.
        device: "cpu" or "cuda".
        peer_memory: False, or None for peer memory alone.

    Returns:
        problem: what failed, or why the library does not use peer memory.
        library: what carries messages, of an MPI its version.
        device_memory_problem: why MPI does not move device memory, in the library's words.
        gpus: number of each rank's GPU.
        latency: seconds of a sum of 8 bytes.
        bandwidth: bytes of a gradient in a second, for 64 MiB.
    """
    import numpy as np

    from collectives.connect import connect
    from oktopk import GradientAllreduce

    transport = connect(comm)
    result: dict[str, Any] = {"problem": "", "library": transport.library}
    place = np.asarray
    if transport.library == "MPI":
        result |= _about_mpi()
    if device == "cuda":
        import cupy

        number = transport.rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(number).use()
        result["gpus"] = transport.allgather_objects(number)
        place = cupy.asarray
    for length, times in ((2, 200), (LENGTH, 10)):
        gradients = [np.random.default_rng(seed).integers(0, 2**23, length) for seed in _SEEDS]
        reducer = GradientAllreduce(transport, length, "dense", device=device, peer_memory=peer_memory)
        gradient = place(gradients[transport.rank].astype(np.float32))
        for _ in range(3):
            reducer.step(gradient)
        if peer_memory is None and reducer.p2p_unavailable_reason:
            return result | {"problem": reducer.p2p_unavailable_reason}
        if not np.array_equal(reducer.backend.to_host(reducer.update), sum(gradients) / 2):
            return result | {"problem": "the sum is not that of the gradients"}
        transport.barrier()
        began = time.perf_counter()
        for _ in range(times):
            reducer.step(gradient)
        reducer.backend.wait()
        seconds = (time.perf_counter() - began) / times
        result |= {"bandwidth": 4 * length / seconds} if length == LENGTH else {"latency": seconds}
        reducer.close()
    return result


def _about_mpi() -> dict[str, Any]:
    from mpi4py import MPI

    from collectives.cuda.ucx import device_memory_problem

    library = " ".join(MPI.Get_library_version().split()).split(", ")[0][:60]
    return {"library": library, "device_memory_problem": device_memory_problem()}


ALONE: dict[str, Callable[[], dict[str, Any]]] = {"gpus": gpus, "mpi": mpi, "cpu": cpu}
"""What one process can try."""
EXCHANGES: dict[str, tuple[str, bool | None]] = {
    "host": ("cpu", False),
    "device": ("cuda", False),
    "peer": ("cuda", None),
}
"""What two processes can try: arguments of `sums`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    what, path = sys.argv[1:] if argv is None else argv
    faulthandler.dump_traceback_later(_DEADLINE, exit=True)
    if what in ALONE:
        Path(f"{path}.0").write_text(json.dumps(ALONE[what]()), encoding="utf-8")
        return 0
    rank, result = 0, {}
    try:
        comm, rank, size = _all_ranks(what)
        result = {"problem": _NOT_TWO.format(size)}
        if size == 2:
            result = sums(comm, *EXCHANGES[what])
    except Exception as error:
        from collectives.cuda.environment import first_line

        result = {"problem": f"{type(error).__name__}: {first_line(error)}"}
        raise  # the runner ends the other process
    finally:
        Path(f"{path}.{rank}").write_text(json.dumps(result), encoding="utf-8")
    return 0


def _all_ranks(what: str) -> tuple[Any, int, int]:
    """The communicator of all ranks, torch's under torchrun, else MPI's; this rank; their number."""
    import collectives  # noqa: F401 - before mpi4py.MPI: it loads the UCX that knows CUDA

    # isort: split
    import os

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl" if what == "device" else "gloo")
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


if __name__ == "__main__":
    sys.exit(main())
