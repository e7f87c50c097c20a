"""Device interface of the bench, with its CPU implementation, and the gradients that are drawn on it.

A new gradient is drawn for every step in one pass over the vector, equal from run to run.

A gradient is `memory` times the last one plus an innovation, which is the sum of a part that all ranks share and
a part of this rank's own, each block of BLOCK elements with a scale of its own. The innovations are read from a
pool of random draws, for every block and step at another place, because drawing 14.7 M variates takes longer
than reducing them.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK = 4096
POOL = 1 << 20
"""Draws to read from, 4 MB: they stay in the cache."""


@dataclass(frozen=True)
class Profile:
    """How drawn gradients are distributed.

    Attributes:
        tail: degrees of freedom of Student's t; 0 for a Gaussian.
        memory: share of the last gradient that the next one keeps, in [0, 1).
        shared: share of an innovation's variance that is the same on all ranks, in [0, 1].
        spread: standard deviation of the logarithm of the blocks' scales.
        hot: a stretch of 1/`hot` of the vector has HOT_SCALE times the scale of the rest, and its first eighth is shared
            by all ranks whatever `shared` says, so that the sums are skewed even where the selections are not; 0 for none.
    """

    tail: float = 0.0
    memory: float = 0.0
    shared: float = 0.0
    spread: float = 0.0
    hot: int = 0


HOT_SCALE = 8.0
PROFILES = {
    "iid": Profile(),
    # as measured on VGG-16 in training: see docs/results/method.md
    "heavy": Profile(tail=4.0, memory=0.3, shared=0.3, spread=0.5),
    "clustered": Profile(tail=4.0, memory=0.3, hot=16),
}
"""The kinds of drawn gradients, by name."""


class GradientSource(ABC):
    """Drawn gradients of one profile on one rank, on whatever device they are put together.

    Args:
        name: of PROFILES.
        length: elements (n).
        rank: draws its own part; rank r of P draws the same as rank r of any other number of ranks.
        seed: equal on all ranks.

    Attributes:
        length: n.
        memory: share of the last gradient that is kept.
        pool: float32[POOL + BLOCK].
        common_weights, own_weights: float32[blocks].
    """

    def __init__(self, name: str, length: int, rank: int, seed: int) -> None:
        self.length = length
        self._name, self._seed = name, seed
        self._profile = profile = PROFILES[name]
        self.memory = profile.memory
        common = np.random.default_rng([seed, 0])
        self.pool = _draw_pool(profile.tail, common)
        blocks = -(-length // BLOCK)
        scales = np.exp(profile.spread * common.standard_normal(blocks))
        shared = np.full(blocks, profile.shared)
        if profile.hot:
            first, width = blocks // 3, max(1, blocks // profile.hot)
            scales[first : first + width] *= HOT_SCALE
            shared[first : first + max(1, width // 8)] = 1.0
        scales *= np.sqrt(1 - profile.memory**2)
        self.common_weights = (scales * np.sqrt(shared)).astype(np.float32)
        # the own part is the sum of two reads: one alone would repeat each magnitude all over the vector
        self.own_weights = (scales * np.sqrt((1 - shared) / 2)).astype(np.float32)
        self._common = common
        self._own = np.random.default_rng([seed, 1, rank])

    def starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the next step's blocks begin in the pool: int64[blocks] of the common part, int64[2, blocks] of the own."""
        blocks = len(self.own_weights)
        return self._common.integers(0, POOL, blocks), self._own.integers(0, POOL, (2, blocks))

    def describe(self) -> dict[str, Any]:
        """Plain values that say what they are, for the record."""
        return {"name": self._name, "seed": self._seed, **asdict(self._profile)}

    @abstractmethod
    def next(self) -> Any:
        """float32[n]: this rank's gradient of the next step; valid, and not to be written, until the next call."""


class DrawnGradients(GradientSource):
    """Gradients in host memory. Memory: n words for the gradient, 4 MB for the pool."""

    def __init__(self, name: str, length: int, rank: int, seed: int) -> None:
        super().__init__(name, length, rank, seed)
        self._vector = np.zeros(length, np.float32)

    def next(self) -> NDArray[np.float32]:
        common, own = self.starts()
        memory = np.float32(self.memory)
        _advance(self._vector, self.pool, memory, self.common_weights, common, self.own_weights, own)
        return self._vector


def _draw_pool(tail: float, generator: np.random.Generator) -> NDArray[np.float32]:
    """float32[POOL + BLOCK] of unit variance; its end repeats its beginning, so that a block may start anywhere."""
    draws = generator.standard_t(tail, POOL) if tail else generator.standard_normal(POOL)
    return np.concatenate([draws, draws[:BLOCK]]).astype(np.float32) / np.float32(draws.std())


@njit(cache=True)
def _advance(vector, pool, memory, common_weights, common_starts, own_weights, own_starts):  # type: ignore[no-untyped-def]
    for block in range(len(common_weights)):
        part = vector[block * BLOCK : (block + 1) * BLOCK]
        size = len(part)
        common = pool[common_starts[block] : common_starts[block] + size]
        own = pool[own_starts[0, block] : own_starts[0, block] + size]
        second = pool[own_starts[1, block] : own_starts[1, block] + size]
        common_weight, own_weight = common_weights[block], own_weights[block]
        for i in range(size):
            part[i] = memory * part[i] + common_weight * common[i] + own_weight * (own[i] + second[i])


DEVICES = ("cpu", "cuda")
"""What `--device` takes."""


class Device:
    """The CPU and its memory.

    Attributes:
        name: as `oktopk.GradientAllreduce` takes it.
        asynchronous: work may still go on when the call that asked for it has returned.
        sharers: ranks that share its memory, this one included.
    """

    name = "cpu"
    asynchronous = False

    def __init__(self, sharers: int = 1) -> None:
        self.sharers = sharers

    def source(self, name: str, length: int, rank: int, seed: int) -> GradientSource:
        """Drawn gradients, where the reducers want them; arguments as `GradientSource`."""
        return DrawnGradients(name, length, rank, seed)

    def to_device(self, gradient: Any) -> Any:
        """A source's gradient where, and as what, the reducers want it; called outside the timed region."""
        return gradient

    def digest(self, update: Any) -> int:
        """Equal for updates that are bit-identical; called outside the timed region."""
        return zlib.crc32(update.data)

    def finish(self) -> None:
        """Return when all work that was asked for has completed; called inside the timed region."""

    def release(self) -> None:
        """Give back what nobody uses any more."""
