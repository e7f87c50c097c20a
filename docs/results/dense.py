"""Dense allreduces of the GPUs of one host, 4 KB to 512 MB: Ok-Topk's over peer memory beside NCCL's and torch's.

    python -m jobs.launch -n 2 -m docs.results.dense --type float32

Prints a table: us of a call in a CUDA graph of several, the median of replays, on the slowest rank; and each one's error against
float64. Ok-Topk's algorithms must give equal bits.
"""

import argparse
import hashlib
import statistics
import sys
from functools import partial

import cupy
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import _symmetric_memory as symmetric_memory

from collectives.connect import connect
from collectives.cuda.dense_algorithms import ALGORITHMS
from collectives.cuda.dense_p2p import DenseP2P
from collectives.cuda.device import Device
from collectives.limit import Limit
from jobs.bench.libraries import join_nccl, leave_nccl
from jobs.render.table import Column, shown, table
from jobs.restart import signals

LENGTHS = tuple(4096 << i for i in range(18))
CHECKED = 1 << 18  # bytes, which each algorithm takes on up to 8 ranks
MOST_ERROR = 0.02  # of a sum in 16 bits
CALLS = ((1 << 20, 100), (16 << 20, 40), (LENGTHS[-1], 16))  # of a graph, up to so many bytes


def contestants(dense, kind, vector, stream):
    """Name -> a function of n, which gives a call that sums n elements of a vector, and where the sum is.

    Algorithms of Ok-Topk that cannot take n elements, as without NVLink, give None.
    """
    out = torch.empty_like(vector)

    def ours(algorithm, target, n):
        pointers = vector.data_ptr(), target.data_ptr(), 0
        call = partial(dense.enqueue, *pointers, n, kind, stream=stream.cuda_stream, algorithm=algorithm)
        fits = algorithm is None or dense.can_run(algorithm, n * vector.itemsize)
        return (call, target[:n]) if fits else None

    makers = {"Ok-Topk in place": partial(ours, None, vector), "out of place": partial(ours, None, out)}
    makers |= {name: partial(ours, name, out) for name in ALGORITHMS}
    makers["NCCL in place"] = lambda n: (partial(dist.all_reduce, vector[:n]), vector[:n])
    if kind != "float16":  # which torch's sums in symmetric memory do not take
        shared, group = (
            symmetric_memory.empty(len(vector), dtype=vector.dtype, device=vector.device),
            dist.group.WORLD,
        )
        symmetric_memory.rendezvous(shared, group.group_name)
        shared.copy_(vector)
        sums = torch.ops.symm_mem
        makers["torch, one shot"] = lambda n: (
            partial(sums.one_shot_all_reduce_out, shared[:n], "sum", group.group_name, out[:n]),
            out[:n],
        )
        makers["torch, two shots"] = lambda n: (
            partial(sums.two_shot_all_reduce_, shared[:n], "sum", group.group_name),
            shared[:n],
        )
    return makers


def error(call, target, kept, exact, vector, comm):
    """‖sum − sum in float64‖ / ‖sum in float64‖ of a call, the largest of all ranks, and a digest of the sum, equal on all."""
    for start in (vector, target):
        start[: len(kept)].copy_(kept)
    torch.cuda.synchronize()
    comm.Barrier()
    call()
    torch.cuda.synchronize()
    relative = float((target.double() - exact).norm() / exact.norm())
    digest = hashlib.sha256(target.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
    assert len(set(comm.allgather(digest))) == 1, "ranks have different sums"
    vector[: len(kept)].copy_(kept)
    largest = max(comm.allgather(relative), key=lambda each: (each != each, each))
    assert largest < MOST_ERROR, f"a sum is wrong by {largest}"
    return largest, digest


def seconds(call, calls, comm):
    """Of a call in a graph of several, on the slowest rank."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    comm.Barrier()
    graph, spent = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(8):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3 / calls)
    return comm.allreduce(statistics.median(spent[1:]), MPI.MAX)


def main(comm=MPI.COMM_WORLD):
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m jobs.launch -n RANKS -m docs.results.dense")
    parser.add_argument("--type", choices=("float32", "bfloat16", "float16"), default="float32")
    kind = parser.parse_args().type
    if not comm.allreduce(comm.rank < torch.cuda.device_count(), MPI.LAND):
        if comm.rank == 0:
            print("docs.results.dense: needs one host with a GPU for each rank", file=sys.stderr)
        return 2
    torch.cuda.set_device(comm.rank)
    cupy.cuda.Device(comm.rank).use()
    join_nccl(comm)
    transport, stream = connect(comm, Limit("docs.results.dense", 60.0)), torch.cuda.Stream()
    dense = DenseP2P(transport, Device(cupy.cuda.ExternalStream(stream.cuda_stream)), 60.0)
    torch.manual_seed(comm.rank)
    with torch.cuda.stream(stream):
        width = getattr(torch, kind).itemsize
        vector = torch.randn(LENGTHS[-1] // width, device="cuda").to(getattr(torch, kind))
        makers = contestants(dense, kind, vector, stream)
        kept = vector[: CHECKED // width].clone()
        parts = [torch.empty_like(kept) for _ in range(comm.size)]
        dist.all_gather(parts, kept)
        exact = torch.stack(parts).double().sum(dim=0)
        calls = {name: make(len(kept)) for name, make in makers.items()}
        checked = {
            name: error(*call, kept, exact, vector, comm) for name, call in calls.items() if call is not None
        }
        own = {
            digest
            for name, (_, digest) in checked.items()
            if name.split(",")[0] not in ("NCCL in place", "torch")
        }
        assert len(own) == 1, "algorithms of Ok-Topk differ in their bits"
        rows = []
        for nbytes in LENGTHS:
            repeats = next(repeats for most, repeats in CALLS if nbytes <= most)
            calls = {name: make(nbytes // width) for name, make in makers.items()}
            times = {
                name: seconds(call[0], repeats, comm) for name, call in calls.items() if call is not None
            }
            rows.append(times | {"bytes": f"{nbytes >> 10:,} KB", "takes": str(dense.algorithm_for(nbytes))})
    dense.check()
    dense.close()
    transport.close()
    columns = [Column("bytes", lambda row: row["bytes"])]
    columns += [Column(name, lambda row, name=name: shown(row.get(name), "{:.1f}", 1e6)) for name in makers]
    columns.append(Column("takes", lambda row: row["takes"]))
    if comm.rank == 0:
        print(table(columns, rows).markdown())
        print("\n" + ", ".join(f"{name}: error {far:.2g}" for name, (far, _) in checked.items()))
    leave_nccl()
    return 0


if __name__ == "__main__":
    signals.leave(main())
