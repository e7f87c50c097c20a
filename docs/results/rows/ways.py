"""Ways to sum the rows that ranks touched of a table, as one finds them elsewhere.

A way takes int64[R] rows, each perhaps several times, their [R, width] values, and a function to call when a stage has ended. It
returns ascending rows, or None for a whole table, their sums, and the bytes that a rank sends, as a ring would. Collective.
"""

from functools import partial

import torch
import torch.distributed as dist
from mpi4py import MPI

from jobs.train.reduce.process_group import ring_traffic


def coalesced(table, rows, values):
    """Equal rows added up, by torch."""
    summed = torch.sparse_coo_tensor(rows[None], values, table, check_invariants=False).coalesce()
    return summed.indices()[0], summed.values()


def dense(whole, comm, rows, values, lap):
    """Scatter into a whole table, and sum it: over MPI on a CPU, by NCCL on a GPU."""
    whole.zero_().index_add_(0, rows, values)
    lap("scatter")
    dist.all_reduce(whole) if whole.is_cuda else comm.Allreduce(MPI.IN_PLACE, whole.numpy())
    lap("allreduce")
    return None, whole, ring_traffic(whole.numel(), comm.size, 1).bytes


def gathered_by_mpi(comm, local):
    """The ranks' tensors one after the other, by MPI's Allgatherv."""
    lengths = comm.allgather(len(local))
    everyones = local.new_empty(sum(lengths), *local.shape[1:])
    comm.Allgatherv(local.numpy(), [everyones.numpy(), [length * local[:1].numel() for length in lengths]])
    return everyones


def gathered_by_torch(local):
    """The same by torch's all_gather, whose tensors are of one length: padded."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.full_like(lengths[0], len(local)))
    counts = [int(length) for length in lengths]
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def two_allgathers(table, gather, first, rows, values, lap):
    """Gather rows, then values, and add all up on every rank; first: coalesce them before, which Horovod does not."""
    if first:
        rows, values = coalesced(table, rows, values)
        lap("coalesce")
    everyones = gather(rows), gather(values)
    lap("gather")
    sums = coalesced(table, *everyones)
    lap("sum")
    return *sums, (dist.get_world_size() - 1) * (rows.nbytes + values.nbytes)


def match_in_a_loop(union, rows):
    """Where rows stand in the union: v1, a search of the union per row."""
    return torch.cat([(union == row).nonzero()[0] for row in rows])


def match_all_pairs(union, rows):
    """The same: v4, all pairs compared, in chunks of 16 M on a CPU and 268 M on a GPU."""
    chunks = rows.split(max(1, (1 << (28 if rows.is_cuda else 24)) // len(union)))
    return torch.cat([(union == chunk[:, None]).nonzero()[:, 1] for chunk in chunks])


def sum_over_union(table, match, rows, values, lap):
    """Gather everyone's rows, and sum the values of all of their union, zeros where a rank has none."""
    rows, values = coalesced(table, rows, values)
    lap("coalesce")
    union = torch.unique(gathered_by_torch(rows))
    lap("union")
    places = match(union, rows)
    lap("match")
    filled = values.new_zeros(len(union), values.shape[1]).index_copy_(0, places, values)
    lap("scatter")
    dist.all_reduce(filled)
    lap("allreduce")
    ranks = dist.get_world_size()
    return union, filled, (ranks - 1) * rows.nbytes + ring_traffic(filled.numel(), ranks, 1).bytes


def gloo_sparse(table, rows, values, lap):
    """`torch.distributed.all_reduce` of a sparse tensor, which gloo alone takes."""
    rows, values = coalesced(table, rows, values)
    lap("coalesce")
    tensor = torch.sparse_coo_tensor(rows[None], values, table, is_coalesced=True, check_invariants=False)
    dist.all_reduce(tensor)
    summed = tensor.coalesce()
    lap("allreduce")
    return summed.indices()[0], summed.values(), (dist.get_world_size() - 1) * (rows.nbytes + values.nbytes)


def ways(table, comm, cuda):
    """Name -> way, of all but `dense`, which needs a whole table."""
    unions = {"v1": match_in_a_loop, "v4": match_all_pairs, "v6": torch.searchsorted}
    found = {f"union-{name}": partial(sum_over_union, table, match) for name, match in unions.items()}
    found["two-allgathers"] = partial(two_allgathers, table, gathered_by_torch, False)
    found["two-allgathers-coalesced"] = partial(two_allgathers, table, gathered_by_torch, True)
    if not cuda:
        found["two-allgathers-mpi"] = partial(two_allgathers, table, partial(gathered_by_mpi, comm), False)
        found["gloo-sparse"] = partial(gloo_sparse, table)
    return found
