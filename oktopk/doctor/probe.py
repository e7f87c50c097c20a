"""What the doctor tries in processes of its own, so that a crash or a hang there is a finding and no more.

    python -m oktopk.doctor.probe gpus FILE                        one process; also mpi, cpu
    mpiexec -n 2 python -m mpi4py -m oktopk.doctor.probe host FILE     also device, staged, peer

Every process writes what it found as JSON: into FILE.0, and FILE.1.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from oktopk.launch import library_problem

SIZE = 2**26
"""Bytes that bandwidth is measured with."""
_SEEDS = (20220402, 20220406)
_DEADLINE = 300  # seconds after which a process that nobody ends, ends itself


def gpus() -> dict[str, Any]:
    """The driver, the GPUs, whether they reach each other's memory, and whether our kernels compile for them."""
    from collectives.cuda import environment as cuda_problems

    problem = cuda_problems.gpu_problem()
    result: dict[str, Any] = {"driver": cuda_problems.driver_version(), "problem": problem}
    try:
        import cupy

        runtime = cupy.cuda.runtime
        result["runtime"] = runtime.runtimeGetVersion()
        numbers = range(runtime.getDeviceCount())
        result["devices"] = [_properties(runtime.getDeviceProperties(number)) for number in numbers]
        result["peer_access"] = [
            [one == other or bool(runtime.deviceCanAccessPeer(one, other)) for other in numbers]
            for one in numbers
        ]
    except Exception as error:  # of a CuPy that is missing or broken, which gpu_problem has a sentence for
        result["problem"] = problem or cuda_problems.first_line(error)
    return result if result["problem"] else result | _compile()


def mpi() -> dict[str, Any]:
    """Whether there is an MPI library. Does not start it."""
    return {"problem": library_problem()}


def cpu() -> dict[str, Any]:
    """Compiles the kernels of CPU ranks into Numba's cache, and counts those that it lacked."""
    from collectives.cpu.compiled import cache_problem
    from oktopk.cpu import compile_kernels

    uncached = cache_problem()
    return {"problem": "", "uncached": uncached, "compiled": 0 if uncached else compile_kernels()}


def _compile() -> dict[str, Any]:
    """Whether our kernels compile, and how long that takes."""
    import mpi4py

    from collectives.cuda.environment import kernel_problem

    mpi4py.rc(initialize=False)
    try:
        from collectives.cuda import dense_algorithms, device, rows
        from collectives.cuda import kernels as device_kernels
        from collectives.cuda import launch as launches
        from oktopk.cuda import kernels as gradient_kernels
        from oktopk.devices import GRADIENT_TYPES
    except (ImportError, RuntimeError):  # no MPI library, which the exchanges will say
        return {}
    began = time.perf_counter()
    try:
        gpu = device.Device()
        device_kernels.DeviceKernels(gpu)
        for gradient_type in GRADIENT_TYPES["cuda"]:
            _ = gradient_kernels.DeviceKernels(gpu, gradient_type).shard_sum_kernels
            rows.DeviceRowKernels(gpu, gradient_type)
            dense_algorithms.dense_kernels(gradient_type, 2)
        for source in _untyped_sources(device_kernels, gradient_kernels):
            launches.compiled(source).compile()
    except Exception as error:
        return {"problem": kernel_problem(error)}
    return {"kernel_seconds": time.perf_counter() - began}


def _untyped_sources(*modules: ModuleType) -> list[Path]:
    """The `.cu` files beside these modules that know no type of gradient."""
    folders = [Path(str(module.__file__)).parent for module in modules]
    sources = [source for folder in folders for source in sorted(folder.glob("*.cu"))]
    return [source for source in sources if "GRADIENT" not in source.read_text(encoding="utf-8")]


def _properties(properties: dict[str, Any]) -> dict[str, Any]:
    name = properties["name"]
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "bytes": int(properties["totalGlobalMem"]),
        "capability": f"{properties['major']}.{properties['minor']}",
    }


def host(comm: Any) -> dict[str, Any]:
    """Host memory through MPI; and what MPI says of itself."""
    import numpy as np
    from mpi4py import MPI

    from collectives.cuda.ucx import device_memory_problem
    from collectives.mpi import connect

    library = " ".join(MPI.Get_library_version().split()).split(", ")[0]
    result = {"library": library[:60], "device_memory_problem": device_memory_problem()}
    return result | _measure(connect(comm), np.copy, np.copy, lambda: None)


def device(comm: Any) -> dict[str, Any]:
    """Device memory, given to MPI."""
    from collectives.mpi_cuda import CudaMpiTransport

    return _on_gpus(comm, CudaMpiTransport)


def staged(comm: Any) -> dict[str, Any]:
    """Device memory through pinned host memory."""
    from collectives.mpi_cuda import StagedCudaTransport

    return _on_gpus(comm, StagedCudaTransport)


def _on_gpus(comm: Any, transport_of: Callable[..., Any]) -> dict[str, Any]:
    import cupy

    from collectives.cuda.device import Device
    from collectives.mpi_cuda import select_device

    number = select_device(comm)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        device = Device(stream)

        def place(array: Any) -> Any:
            placed = device.allocate(
                array.size, array.dtype
            )  # of the kind of memory that the library sends from
            placed.set(array, stream=stream)
            stream.synchronize()
            return placed

        result = _measure(
            transport_of(comm, device), place, lambda array: array.get(stream=stream), device.synchronize
        )
    return result | {"devices": comm.allgather(number)}


def peer(comm: Any) -> dict[str, Any]:
    """Device memory of the other process, opened by CUDA IPC and read; and why the library would not use it."""
    import cupy
    import numpy as np

    from collectives.cuda.device import Device
    from collectives.mpi import connect
    from collectives.mpi_cuda import select_device
    from collectives.symmetric_memory import symmetric_memory_problem

    number, other = select_device(comm), 1 - comm.rank
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    device = Device(stream)
    mine, copied = device.allocate(SIZE // 8, np.uint64), device.allocate(SIZE // 8, np.uint64)
    mine.set(_random(comm.rank), stream=stream)
    stream.synchronize()
    theirs = runtime.ipcOpenMemHandle(
        comm.sendrecv(runtime.ipcGetMemHandle(mine.data.ptr), other, 0, None, other)
    )
    comm.Barrier()

    def copy(nbytes: int, times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            device.copy(copied.data.ptr, theirs, nbytes)
            device.synchronize()
        return (time.perf_counter() - began) / times

    copy(SIZE, 1)
    equal = bool(np.array_equal(copied.get(stream=stream), _random(other)))
    copy(8, 20)
    latency = copy(8, 200)
    comm.Barrier()
    if comm.rank == 0:  # one direction at a time, as the others
        bandwidth = SIZE / copy(SIZE, 10)
    comm.Barrier()
    runtime.ipcCloseMemHandle(theirs)
    comm.Barrier()
    problem = "" if equal else "the bytes that were read are not those that were written"
    result = {"problem": problem, "refused": symmetric_memory_problem(connect(comm))}
    if comm.rank == 0:
        result |= {"latency": latency, "bandwidth": bandwidth}  # type: ignore[dict-item]
    return result | {"devices": comm.allgather(number)}


def _measure(
    transport: Any, place: Callable[[Any], Any], fetch: Callable[[Any], Any], finish: Callable[[], Any]
) -> dict[str, Any]:
    """Check 64 MiB bit by bit, both ways at once; then time one way, the mean of many there and back."""
    import numpy as np

    rank, other = transport.rank, 1 - transport.rank
    outgoing, incoming = place(_random(rank)), place(np.zeros(SIZE // 8, np.uint64))
    transport.wait(transport.receive(incoming, other) + transport.send(outgoing, other))
    finish()
    if not np.array_equal(fetch(incoming), _random(other)):
        return {"problem": "the bytes that arrived are not those that were sent"}

    def one_way(count: int, times: int) -> float:
        sent, received = outgoing[:count], incoming[:count]
        transport.barrier()
        began = time.perf_counter()
        for _ in range(times):
            if rank == 0:
                transport.wait(transport.send(sent, other))
                transport.wait(transport.receive(received, other))
            else:
                transport.wait(transport.receive(received, other))
                transport.wait(transport.send(sent, other))
        finish()
        return (time.perf_counter() - began) / (2 * times)

    one_way(1, 50)
    latency = one_way(1, 500)
    one_way(SIZE // 8, 2)
    return {"problem": "", "latency": latency, "bandwidth": SIZE / one_way(SIZE // 8, 10)}


def _random(rank: int) -> Any:
    """uint64 of 64 MiB that only this rank has."""
    import numpy as np

    return np.random.default_rng(_SEEDS[rank]).integers(0, 2**64, SIZE // 8, np.uint64)


ALONE: dict[str, Callable[[], dict[str, Any]]] = {"gpus": gpus, "mpi": mpi, "cpu": cpu}
"""What one process can try."""
EXCHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "host": host,
    "device": device,
    "staged": staged,
    "peer": peer,
}
"""What two processes can try."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    what, path = sys.argv[1:] if argv is None else argv
    faulthandler.dump_traceback_later(_DEADLINE, exit=True)
    if what in ALONE:
        Path(f"{path}.0").write_text(json.dumps(ALONE[what]()), encoding="utf-8")
        return 0
    import collectives  # noqa: F401 - before mpi4py.MPI: it loads the UCX that knows CUDA

    # isort: split
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size != 2:
        text = f"the launcher started processes that see {comm.size} of each other, not 2: its MPI is not mpi4py's"
        result: dict[str, Any] = {
            "problem": f"{text} (under Slurm try srun --mpi=pmix or --mpi=pmi2; srun --mpi=list)"
        }
    else:
        try:
            result = EXCHANGES[what](comm)
        except Exception as error:
            from collectives.cuda.environment import first_line

            result = {"problem": f"{type(error).__name__}: {first_line(error)}"}
            Path(f"{path}.{comm.rank}").write_text(json.dumps(result), encoding="utf-8")
            raise  # the runner ends the other process
    Path(f"{path}.{comm.rank}").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
