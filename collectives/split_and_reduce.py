"""Split and reduce: every rank sums the sparse contributions of all ranks to its own region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from collectives.codec import PLAIN, Codec
from collectives.errors import FlaggedRanksError
from collectives.sparse import ENTRY, Entries, SparseVector, slices
from collectives.transport import Round, Transport

if TYPE_CHECKING:
    from collectives.cpu.kernels import CountedSums


@dataclass(frozen=True)
class RegionLists:
    """All contributions to this rank's region, ready to be summed.

    Attributes:
        pool: ENTRY[m], where the sorted lists lie.
        begins, ends: int64[lists]; list j is pool[begins[j]:ends[j]]. Sums add the lists in this order.
        lower, upper: the region, [lower, upper).
        transport: its kernels sum, its workspace holds the result.
        codec: that decoded the lists.
        overflowed: a sum that was to be in a list is Inf or NaN, and nothing of the step may be applied.
        passed: sums that this rank passed on to the owners of other regions, until the next exchange; with a codec that rounds
            their rounding errors, which belong to its residual where they are applied. None where it summed none.
    """

    pool: Entries
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    lower: int
    upper: int
    transport: Transport
    codec: Codec = PLAIN
    overflowed: bool = False
    passed: SparseVector | None = None

    def sums(self, threshold_bits: int = 1) -> Entries:
        """ENTRY[nnz] of the region's sums with at least that magnitude, ascending; valid until the next call.

        May be called again with another threshold: the lists stay.
        """
        return self.checked_sums(threshold_bits)[0]

    def checked_sums(self, threshold_bits: int = 1) -> tuple[Entries, int]:
        """As `sums`, and how many of the region's sums are Inf or NaN."""
        out = self._out()
        nnz, nonfinite = self.sum_into(out, threshold_bits)
        return out[:nnz], nonfinite

    def counted(self, expected_bits: int, offsets: NDArray[np.int64]) -> CountedSums:
        """The sums, counted at candidate thresholds; see `counted_sums` of the kernels. Valid until the next call."""
        lists = self.pool, self.begins, self.ends, self.lower, self.upper
        return self.transport.kernels.counted_sums(*lists, expected_bits, offsets, self._out())

    def sum_into(self, out: Entries, threshold_bits: int) -> tuple[int, int]:
        """Write the sums to `out`, ENTRY[most_sums + 1], elsewhere in the pool perhaps; see `sum_sorted_lists` of the kernels."""
        lists = self.pool, self.begins, self.ends, self.lower, self.upper
        return self.transport.kernels.sum_sorted_lists(*lists, threshold_bits, out)

    @property
    def damaged(self) -> bool:
        """Whether a list did not decode, and counts as zero, or has `overflowed`. Known once sums or counts were computed."""
        return self.overflowed or self.codec.damaged

    @property
    def most_sums(self) -> int:
        """An upper bound of the number of sums."""
        return min(int((self.ends - self.begins).sum()), self.upper - self.lower)

    def lay_out(self) -> None:
        """Prepare the sums on a device while the lists are on their way; their begins and ends must stay as they are."""
        if self.transport.kernels.ASYNCHRONOUS:
            lists = self.pool, self.begins, self.ends, self.lower, self.upper
            self.transport.kernels.lay_out_sums(*lists)

    def _out(self) -> Entries:
        return self.transport.workspace.entries("region sums", self.most_sums + 1)


def split_and_reduce(
    packed: SparseVector,
    boundaries: NDArray[np.int64],
    transport: Transport,
    flag: bool = False,
    offsets: Sequence[int] | NDArray[np.int64] | None = None,
    bucket_rounds: int = 8,
    rotate: bool = True,
    codec: Codec = PLAIN,
    meanwhile: Callable[[], object] | None = None,
) -> RegionLists:
    """Send each region's entries to the rank that owns it, and collect those of this rank's own region.

    In round i a rank sends to (r+i) mod P and receives from (r-i) mod P, so that no rank is the target of two at once.
    `bucket_rounds` rounds are a batch, which is in flight at once; one that has arrived is summed while the next is on the
    wire. Sums run in rotation order (own, r-1, r-2, ...), whatever arrives first.

    Args:
        packed: this rank's selection.
        boundaries: int64[P + 1], ascending, equal on all ranks; rank r owns [boundaries[r], boundaries[r + 1]).
        flag: raise FlaggedRanksError on all ranks; it travels with the counts. Collective: every rank must call.
        offsets: int64[P + 1], where each region begins in `packed`; computed if None.
        bucket_rounds: rounds of a batch, in flight at once, >= 1.
        rotate: False sends to ranks 0, 1, 2, ... in the same order everywhere, for comparison.
        codec: encodes the entries sent; equal on all ranks. One that rounds leaves rounding errors for values in `packed`, and 0
            in the own region.
        meanwhile: called once while the first batch is on the wire, if no flag is up; it must leave alone what is exchanged.

    Returns:
        The contributions to [boundaries[r], boundaries[r + 1]), at most one list per rank.

    Raises:
        FlaggedRanksError: on every rank alike, when any rank raised its flag; no payload was sent.

    Traffic: (P-1) messages; the codec's bytes of the entries outside the own region, at most 2·nnz words, 2k(P-1)/P where
        regions balance. Control: one alltoall of 2 int64 per rank.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.1.
    """
    rank, size = transport.rank, transport.size
    if offsets is None:
        offsets = transport.kernels.region_offsets(packed.entries, boundaries)
    offsets = np.asarray(offsets, np.int64)
    # plain integers: slicing by them costs a fraction of slicing by NumPy's
    at, splits = offsets.tolist(), boundaries.tolist()
    lower, upper = splits[rank], splits[rank + 1]
    codec.start()
    selected = [packed.entries[at[q] : at[q + 1]] for q in range(size)]
    sizes = [
        codec.wire_bytes(len(selected[q]), splits[q], splits[q + 1]) // ENTRY.itemsize for q in range(size)
    ]
    outgoing = slices(codec.buffer("outgoing wires", packed.entries, sum(sizes)), sizes)
    for dest in range(size):
        if dest != rank:
            codec.encode(selected[dest], splits[dest], splits[dest + 1], outgoing[dest], dest)
    # their copies to the host, where a transport needs them, go on behind the exchange of counts
    in_first_batch = range(1, min(size, bucket_rounds + 1))
    transport.prepare_sends(
        [outgoing[(rank + i) % size if rotate else other_rank(rank, i)] for i in in_first_batch]
    )
    counts_and_flags = np.array([(stop - start, flag) for start, stop in pairwise(at)], np.int64)
    received = transport.alltoall_control(counts_and_flags).tolist()
    if flagged := [source for source, (_, flag) in enumerate(received) if flag]:
        raise FlaggedRanksError(flagged)

    # slots in the order of summation; the rounds that fill them may run in another one
    order = [(rank - i) % size for i in range(size)]
    counts = [received[source][0] for source in order]
    *starts, total = accumulate(counts, initial=0)
    # two slots for partial sums, which alternate while batches are folded in
    several_batches = size - 1 > bucket_rounds
    partial = min(total, upper - lower) + 1 if several_batches else 0
    pool = transport.workspace.entries("incoming", total + 2 * partial)
    slots = slices(pool, counts)
    sizes = [codec.wire_bytes(count, lower, upper) // ENTRY.itemsize for count in counts]
    incoming = slices(codec.buffer("incoming wires", pool, sum(sizes)), sizes)
    rounds, targets = [], []
    for i in range(1, size):
        dest, source = ((rank + i) % size, order[i]) if rotate else (other_rank(rank, i), other_rank(rank, i))
        slot = (rank - source) % size
        targets.append(slots[slot])
        rounds.append(Round(dest, outgoing[dest], source, incoming[slot]))

    begins = np.array(starts, np.int64)
    ends = begins + counts
    lists = RegionLists(pool, begins, ends, lower, upper, transport, codec)
    first = 0  # lists before it are summed into list `first` already
    spare = total
    arrivals = transport.exchange(rounds, bucket_rounds)
    # while the first batch is on the wire
    codec.keep(selected[rank], slots[0])
    if meanwhile is not None:
        meanwhile()
    if not several_batches:
        lists.lay_out()
    for batch in arrivals:
        for i in batch:
            codec.decode(rounds[i].incoming, lower, upper, targets[i], rounds[i].source)
        if not rotate or batch.stop == len(rounds):
            continue
        done = slice(first, batch.stop + 1)
        summed = RegionLists(pool, begins[done], ends[done], lower, upper, transport)
        nnz, _ = summed.sum_into(pool[spare : spare + partial], 1)
        first = batch.stop
        begins[first], ends[first] = spare, spare + nnz
        spare = total + partial if spare == total else total
    if not first:
        return lists
    return RegionLists(pool, begins[first:], ends[first:], lower, upper, transport, codec)


def other_rank(rank: int, i: int) -> int:
    """The i-th rank, from 1, that is not `rank`."""
    return i - 1 if i <= rank else i
