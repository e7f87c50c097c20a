"""One step of Ok-Topk from top to bottom, to be read: what the library computes, without what makes it fast and safe.

Thresholds are exact and regions new in every step, and entries travel plain. There is no codec, no balancing, no time limit, no
check of arguments and no care for Inf or NaN. P is any number of ranks, n any length below 2^31, a Vector is float32[n].
Functions with `comm` are collective. `splits` are those of a rank's last selection, at first `equal_splits`; changed in place.

Source: Li & Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022, algorithms 1 and 2.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Comm = MPI.Intracomm
Vector = NDArray[np.float32]
Indices = NDArray[np.int64]
Entries = NDArray[np.void]  # of type ENTRY, in ascending order of their indices
ENTRY = np.dtype([("index", np.int32), ("value", np.float32)])  # 8 bytes: 2 words


def sparse_allreduce(comm: Comm, residual: Vector, splits: Indices, k: int) -> Vector:
    """Apply k entries, summed over the ranks: the top k of the sum of all ranks' top ks.

    Args:
        residual: all that this rank has not applied yet. It becomes zero exactly where this rank selected an entry that is in the
            result, and stays elsewhere. So the new residuals of all ranks plus the result are the sum of the old residuals.
        k: entries to apply, at least 1; equal on all ranks, as n is.

    Returns:
        float32[n], zero except in at most k places; equal on all ranks, bit for bit. It is the sum, not the mean.

    Traffic: at most 6k(P-1)/P words a rank, as a mean over the ranks; about 4k(P-1)/P where regions balance.
    """
    boundaries = region_boundaries(comm, splits, len(residual))  # by the selections of the step before
    selected = top_k(MPI.COMM_SELF, residual, k)  # by the local threshold: that of this rank alone
    sums = split_and_reduce(comm, np.rec.fromarrays([selected, residual[selected]], ENTRY), boundaries)
    kept = top_k(comm, sums, k)  # by the global threshold
    applied = allgatherv(comm, np.rec.fromarrays([boundaries[comm.rank] + kept, sums[kept]], ENTRY))
    residual[np.intersect1d(selected, applied["index"])] = 0
    if len(selected):  # they split it into equal counts
        splits[:] = selected[len(selected) * np.arange(1, comm.size) // comm.size]
    update = np.zeros_like(residual)
    update[applied["index"]] = applied["value"]
    return update


def top_k(comm: Comm, values: Vector, k: int) -> Indices:
    """Ascending positions in this rank's values of those that are among the k largest magnitudes of all ranks.

    Zeros are never taken. Of equal magnitudes the first are taken, rank by rank. Traffic: 33 integers a rank, no payload.
    """
    magnitudes = np.abs(values).view(np.int32)  # the bits of floats >= 0, as integers, have the same order
    threshold = 0  # becomes the largest that k values reach, bit by bit from the highest
    for bit in reversed(range(31)):
        if comm.allreduce(np.count_nonzero(magnitudes >= threshold | 1 << bit)) >= k:
            threshold |= 1 << bit
    threshold = max(threshold, 1)  # no zeros, even where fewer than k values are nonzero
    larger, equal = np.flatnonzero(magnitudes > threshold), np.flatnonzero(magnitudes == threshold)
    left = k - comm.allreduce(len(larger)) - sum(comm.allgather(len(equal))[: comm.rank])
    return np.sort(np.concatenate([larger, equal[: max(left, 0)]]))


def equal_splits(ranks: int, length: int) -> Indices:
    """int64[P - 1], the indices that split the vector into equal lengths."""
    return length * np.arange(1, ranks) // ranks


def region_boundaries(comm: Comm, splits: Indices, length: int) -> Indices:
    """int64[P + 1], equal on all ranks: rank r sums the region [boundaries[r], boundaries[r + 1]).

    The mean of all ranks' splits gives all regions about equally many entries. Traffic: P - 1 integers, no payload.
    """
    return np.array([0, *comm.allreduce(splits) // comm.size, length])


def split_and_reduce(comm: Comm, packed: Entries, boundaries: Indices) -> Vector:
    """Send each rank the part of `packed` in its region; return this rank's region of the sum, as a dense vector.

    In round i a rank sends to rank + i and receives from rank - i (modulo P), so that no rank receives from two at once. Parts
    are added in this order (own, rank - 1, rank - 2, ...), so that the bits of a sum depend on P and the boundaries alone.

    Traffic: 2k(P-1)/P words in P - 1 messages where regions balance; before them an alltoall of counts. Source: section 3.1.1.
    """
    offsets = np.searchsorted(packed["index"], boundaries)
    counts = comm.alltoall(np.diff(offsets).tolist())
    lower, upper = boundaries[comm.rank], boundaries[comm.rank + 1]
    sums = np.zeros(upper - lower, np.float32)
    for i in range(comm.size):  # round 0 is the own part
        dest, source = (comm.rank + i) % comm.size, (comm.rank - i) % comm.size
        part = send_and_receive(comm, packed[offsets[dest] : offsets[dest + 1]], dest, counts[source], source)
        sums[part["index"] - lower] += part["value"]
    return sums


def send_and_receive(comm: Comm, outgoing: Entries, dest: int, count: int, source: int) -> Entries:
    """Send entries to one rank and return ENTRY[count] from another. All payload goes through here."""
    incoming = np.empty(count, ENTRY)
    comm.Sendrecv(outgoing.view(np.int64), dest, 0, incoming.view(np.int64), source)  # MPI knows no ENTRY
    return incoming


def allgatherv(comm: Comm, block: Entries) -> Entries:
    """The blocks of all ranks in rank order, on all ranks.

    A rank has so many `blocks`: its own and those of the next ranks (modulo P). In a round it sends them to
    rank - blocks and receives as many from rank + blocks; the last round moves only what is missing, for any P.

    Traffic: all but the own block received, 2k(P-1)/P words as a mean over the ranks, in ceil(log2 P) messages; before them an
        allgather of counts. Source: section 3.1.2; Bruck et al., IEEE TPDS 1997.
    """
    counts = np.roll(comm.allgather(len(block)), -comm.rank)  # of this rank, the next one, ...
    gathered, blocks = block, 1
    while blocks < comm.size:
        more = min(blocks, comm.size - blocks)
        outgoing, count = gathered[: counts[:more].sum()], counts[blocks : blocks + more].sum()
        dest, source = (comm.rank - blocks) % comm.size, (comm.rank + blocks) % comm.size
        gathered = np.concatenate([gathered, send_and_receive(comm, outgoing, dest, count, source)])
        blocks += more
    return np.roll(gathered, counts[comm.size - comm.rank :].sum())  # rank 0's block comes first


def step_of_gradients(comm: Comm, gradient: Vector, residual: Vector, splits: Indices, k: int) -> Vector:
    """Add the gradient to the residual, in place; return the mean update, which the optimizer takes for a gradient."""
    residual += gradient
    return sparse_allreduce(comm, residual, splits, k) / np.float32(comm.size)


def step_of_updates(
    comm: Comm,
    parameters: Vector,
    reference: Vector,
    residual: Vector,
    splits: Indices,
    k: int,
    share: float,
    decay: float = 1.0,
    kept: float = 1.0,
) -> None:
    """Exchange how far each rank's own optimizer moved its parameters; change all vectors in place.

    Parameters are the reference, equal on all ranks, less a share of the residual, at first zero. Nothing is fused.
    """
    later = splits if residual.any() else splits.copy()  # Adam's first move is equal everywhere
    residual += (reference - share * residual) - parameters  # before the optimizer's step less after it
    reference -= sparse_allreduce(comm, residual, later, k) / np.float32(comm.size)
    residual *= kept  # what is old is forgotten; 1 without
    reference *= decay  # decoupled weight decay; 1 without
    parameters[:] = reference - share * residual
