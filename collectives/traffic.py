"""What a step sends: counters, and the bounds of Ok-Topk that they are held against.

A word is 4 bytes: one value or one index, so a COO entry is 2 words. The bounds stand here and not in `oktopk`, since
reports use them where no communication library is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

WORD_BYTES = 4


@dataclass
class Traffic:
    """Bytes and messages that ONE rank sent.

    Attributes:
        bytes: payload bytes sent point to point.
        bytes_between: those of them that went to another host.
        messages: payload messages sent; an empty message is not sent and not counted.
        control_bytes: bytes of sizes, splits, histograms and flags. The library's own collectives carry them, whose messages
            cannot be seen; counted is the least that a rank must send or forward: (P-1)·m for an allgather or an alltoall
            of m bytes per peer, 2m(P-1)/P, rounded up to whole words, for an allreduce of m bytes. Over gloo also the 8 bytes
            before a message whose length its receiver cannot know.
        control_messages: calls of the library's own collectives, and such messages of 8 bytes.
    """

    bytes: int = 0
    messages: int = 0
    control_bytes: int = 0
    control_messages: int = 0
    bytes_between: int = 0

    def count(self, nbytes: int, messages: int = 1, between: bool = False) -> None:
        """Add payload that this rank sends, to another host if `between`."""
        self.bytes += nbytes
        self.messages += messages
        if between:
            self.bytes_between += nbytes

    def count_control(self, nbytes: int, messages: int = 1) -> None:
        """Add control traffic."""
        self.control_bytes += nbytes
        self.control_messages += messages

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes + other.bytes,
            self.messages + other.messages,
            self.control_bytes + other.control_bytes,
            self.control_messages + other.control_messages,
            self.bytes_between + other.bytes_between,
        )

    @property
    def words(self) -> int:
        """Payload words, rounded up."""
        return -(-self.bytes // WORD_BYTES)

    @property
    def control_words(self) -> int:
        """Control words, rounded up."""
        return -(-self.control_bytes // WORD_BYTES)


def lower_bound(k: int, ranks: int) -> float:
    """Words per rank that any sparse allreduce of k entries must send. Source: Li & Hoefler, theorem 3.1."""
    return 2 * k * (ranks - 1) / ranks


def upper_bound(k: int, ranks: int, exchange: str = "direct") -> float:
    """Words per rank that Ok-Topk sends at most, averaged over steps and ranks.

    Args:
        exchange: "direct", or "grid", whose second stage sends as much again as its first.

    Source: Li & Hoefler, section 3.1; for a grid see docs/concepts.md.
    """
    return (8 if exchange == "grid" else 6) * k * (ranks - 1) / ranks


def step_limit(k: int, ranks: int, exchange: str = "direct") -> float:
    """Words per rank, averaged over the ranks, that no single Ok-Topk step exceeds.

    The selection caps of 5k/4 give it: at most 2·5k/4 words leave a rank in split-and-reduce, and every rank receives at
    most 2·5k/4·(P-1)/P in the allgatherv. Over a grid as many leave it a second time.

    Args:
        exchange: as of `upper_bound`.
    """
    return (10 if exchange == "grid" else 7.5) * k * (ranks - 1) / ranks
