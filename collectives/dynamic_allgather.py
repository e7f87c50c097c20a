"""Allgather of regions, each as COO or dense, whichever is shorter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv
from collectives.mpi import Transport


@dataclass(frozen=True)
class GatheredRegions:
    """Every region's sums, in one buffer.

    Attributes:
        entries: ENTRY[offsets[-1]]; region r lies in entries[offsets[r]:offsets[r + 1]], as COO, or as float32 values of the
            whole region, two to an entry.
        offsets: int64[P + 1].
        dense: bool[P], which regions are dense.
        boundaries: int64[P + 1]; region r is [boundaries[r], boundaries[r + 1]).
    """

    entries: NDArray[np.void]
    offsets: NDArray[np.int64]
    dense: NDArray[np.bool_]
    boundaries: NDArray[np.int64]

    def block(self, region: int) -> NDArray[np.void]:
        """ENTRY[...] of one region."""
        return self.entries[self.offsets[region] : self.offsets[region + 1]]


def allgather_regions(
    sums: NDArray[np.void], counts: NDArray[np.int64], boundaries: NDArray[np.int64], transport: Transport
) -> GatheredRegions:
    """Deliver every rank's region to all ranks.

    Args:
        sums: ENTRY[counts[r]], this rank's region, ascending.
        counts: int64[P], entries of each region, equal on all ranks. Collective: every rank must call.
        boundaries: int64[P + 1], equal on all ranks.

    Returns:
        The regions; they lie in the transport's workspace until the next call.

    Traffic: min(2·nnz, length) words of every other rank's region received (a dense one rounded up to an even count),
        ceil(log2 P) rounds.
    Source: Renggli et al., SparCML, SC 2019, section 5.3.
    """
    lengths = np.diff(boundaries)
    dense = 2 * counts > lengths
    units = np.where(dense, (lengths + 1) // 2, counts)
    offsets = np.zeros(transport.size + 1, np.int64)
    np.cumsum(units, out=offsets[1:])
    gathered = transport.workspace.entries("gathered", int(offsets[-1]))
    regions = GatheredRegions(gathered, offsets, dense, boundaries)
    if dense[transport.rank]:
        block = regions.block(transport.rank)
        transport.kernels.write_block(sums, int(boundaries[transport.rank]), block)
        allgatherv(gathered, units, transport)
    else:
        allgatherv(gathered, units, transport, own=sums)
    return regions
