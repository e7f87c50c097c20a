"""A word of each rank that all ranks see in a step, without a message of its own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from collectives.shared_vectors import SharedVectors
from collectives.transport import Transport

_BITS = 31
_MASK = (1 << _BITS) - 1


def token_of(*parts: bytes) -> int:
    """Two checksums of 31 bits in one word.

    Args:
        parts: two texts, one a checksum.
    """
    low, high = (zlib.crc32(part) & _MASK for part in parts)
    return high << _BITS | low


def parts_of(token: int) -> tuple[int, int]:
    """The two checksums of a token."""
    return token & _MASK, token >> _BITS


def combined(tokens: Sequence[int]) -> int:
    """One token for several: each checksum that is equal in all of them, or a checksum of them all."""
    parts = [
        each[0] if len(set(each)) == 1 else zlib.crc32(repr(each).encode()) & _MASK
        for each in zip(*map(parts_of, tokens), strict=True)
    ]
    return parts[1] << _BITS | parts[0]


class TokenBoard:
    """Tokens in memory that the ranks of a host share, for steps in which no message travels but by kernels.

    Between `post` and `read` a rank must have learned that all ranks have posted, as the outcome of a step tells. It posts again
    after it has read.

    Args:
        transport: of the ranks, all on one host.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._words: Any = None  # int64[P, 2], once a step has a token, where the ranks can map it
        self._tried = self._shown = False
        self._posted = 0

    def post(self, token: int | None) -> None:
        """Let the others read this rank's token; None for none. Collective in the first step that has one."""
        self._shown = token is not None
        if token is None:
            return
        if not self._tried:
            self._tried = True
            with suppress(RuntimeError):  # on every rank alike: tokens are not known then
                # a rank may post for the next step while another one reads this step's
                self._words = SharedVectors(self._transport, 4).rows.view(np.int64)[:, :2]
        if self._words is not None:
            self._posted += 1
            self._words[self._transport.rank, self._posted % 2] = token

    def read(self) -> tuple[int, ...] | None:
        """The tokens of all ranks in the step of the last `post`; None where they are not known."""
        if not self._shown or self._words is None:
            return None
        return tuple(self._words[:, self._posted % 2].tolist())
