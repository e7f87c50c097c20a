"""Two levels: the ranks of a host sum their gradients, each one shard, and shards are reduced between hosts.

A shard is block-cyclic: block b of the vector belongs to shard b modulo the number of shards, so that no layer's mass falls on
one rank alone. Elements have the same order in a shard as in the vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import Array, Vector
from oktopk.step import Spans

BLOCK = 1 << 16
"""Elements of a block; fewer where the vector is too short for a block a shard."""


@dataclass(frozen=True)
class Layout:
    """Which rank holds which part of a vector.

    Attributes:
        hosts: the number of each rank's host, from 0.
        length: elements of the vector (n).
    """

    hosts: tuple[int, ...]
    length: int

    @cached_property
    def block(self) -> int:
        """Elements of a block."""
        return min(BLOCK, -(-self.length // min(Counter(self.hosts).values())))

    @cached_property
    def shards(self) -> int:
        """Shards of the vector: as many as the smallest host has ranks, fewer for a vector of fewer elements than that."""
        blocks = -(-self.length // self.block)
        return min(blocks, *Counter(self.hosts).values())

    def shard_of(self, rank: int) -> int | None:
        """The shard that a rank holds of its host's sum; None for a rank that holds none."""
        place = self.hosts[:rank].count(self.hosts[rank])
        return place if place < self.shards else None

    def shard_length(self, shard: int | None) -> int:
        """Elements of a shard, 0 for None."""
        if shard is None:
            return 0
        cycle = self.block * self.shards
        rest = self.length % cycle - shard * self.block
        return self.length // cycle * self.block + min(max(rest, 0), self.block)

    def spans_of_shard(self, spans: Spans, shard: int) -> Spans:
        """Where a shard holds spans of the vector: its elements are in the vector's order, so that each stays one span."""

        def before(place: int) -> int:
            cycle, rest = divmod(place, self.block * self.shards)
            return cycle * self.block + min(max(rest - shard * self.block, 0), self.block)

        in_shard = ((before(begin), before(end)) for begin, end in spans)
        return tuple((begin, end) for begin, end in in_shard if begin < end)

    def places(self, shard: int, begin: int, end: int) -> NDArray[np.int64]:
        """int64[end - begin]: where elements [begin, end) of a shard lie in the vector."""
        elements = np.arange(begin, end, dtype=np.int64)
        return elements + (elements // self.block * (self.shards - 1) + shard) * self.block

    def extract(self, whole: Any, shard: int, part: Any = None) -> Any:
        """A copy of a shard of a vector of n elements, in `part`, or in float32; all of NumPy, of CuPy or of torch."""
        if part is None:
            part = np.empty(self.shard_length(shard), np.float32)
        for of_part, of_whole in self._pieces(shard, part, whole):
            of_part[:] = of_whole
        return part

    def insert(self, part: Vector, shard: int, whole: Vector) -> None:
        """Write a shard to where it lies in float32[n]; both of NumPy or both of CuPy."""
        for of_part, of_whole in self._pieces(shard, part, whole):
            of_whole[:] = of_part

    def _pieces(self, shard: int, part: Array, whole: Array) -> Iterator[tuple[Array, Array]]:
        """Views of equal shapes that together are a shard: as it lies by itself, and in the vector."""
        blocks, rest = self._places(shard, whole)
        first = len(part) - len(rest)
        yield part[:first].reshape(blocks.shape), blocks
        yield part[first:], rest

    def _places(self, shard: int, whole: Array) -> tuple[Array, Array]:
        """Views of a vector [n] that together are a shard: [cycles, block], and what lies behind the last whole cycle."""
        cycles = self.length // (self.block * self.shards)
        first = cycles * self.block * self.shards
        start = min(first + shard * self.block, self.length)
        blocks = whole[:first].reshape(cycles, self.shards, self.block)[:, shard]
        return blocks, whole[start : min(start + self.block, self.length)]


def levels_taken(wanted: str, layout: Layout, flat_reason: str) -> tuple[str, str]:
    """Choose between flat steps and two levels.

    Args:
        wanted: the setting `levels`.
        layout: of the ranks.
        flat_reason: why steps can only be flat, in a sentence; "" if they need not be.

    Returns:
        ("flat" or "hosts", why flat; "" where that was asked for or where it is "hosts").

    Raises:
        ValueError: two levels are asked for and cannot be.
    """
    if wanted == "flat":
        return "flat", ""
    if wanted == "hosts":
        if flat_reason:
            raise ValueError(f"levels 'hosts': {flat_reason}")
        return "hosts", ""
    ranks = Counter(layout.hosts).values()
    if len(ranks) < 2 or min(ranks) < 2:
        return "flat", "there are not several hosts with several ranks each"
    return ("flat", flat_reason) if flat_reason else ("hosts", "")
