"""What a step puts on the wire: counters, and the formulas they are held against.

A word is 4 bytes: one value or one index, so a COO entry is 2 words.
"""

from __future__ import annotations

from dataclasses import dataclass

WORD_BYTES = 4
ENTRY_WORDS = 2


@dataclass
class Traffic:
    """Words and messages that ONE rank sent.

    Attributes:
        words: payload words sent point to point.
        messages: payload messages sent; an empty message is not sent and not counted.
        control_words: words of sizes, cuts, histograms and flags. MPI's own collectives carry them, whose messages
            cannot be seen; counted is the least a rank must send or forward: (P-1)·m for an allgather or an alltoall
            of m words per peer, 2m(P-1)/P rounded up for an allreduce of m words.
        control_messages: calls of MPI's own collectives.
    """

    words: int = 0
    messages: int = 0
    control_words: int = 0
    control_messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.words + other.words,
            self.messages + other.messages,
            self.control_words + other.control_words,
            self.control_messages + other.control_messages,
        )


def lower_bound(k: int, ranks: int) -> float:
    """Words per rank that any sparse allreduce of k entries must send. Source: Li & Hoefler, theorem 3.1."""
    return 2 * k * (ranks - 1) / ranks


def upper_bound(k: int, ranks: int) -> float:
    """Words per rank that Ok-Topk sends at most, averaged over steps and ranks. Source: Li & Hoefler, section 3.1."""
    return 6 * k * (ranks - 1) / ranks


def step_limit(k: int, ranks: int) -> float:
    """Words per rank, averaged over the ranks, that no single Ok-Topk step exceeds.

    The selection caps of 5k/4 give it: at most 2·5k/4 words leave a rank in split-and-reduce, and every rank receives at
    most 2·5k/4·(P-1)/P in the allgatherv.
    """
    return 7.5 * k * (ranks - 1) / ranks


def dense_words(length: int, ranks: int) -> float:
    """Words per rank of Rabenseifner's allreduce, averaged over the ranks.

    2n(P-1)/P where P is a power of two. Otherwise, with p the power of two below P, the P - p surplus ranks fold in and
    out of a partner at 5n/2 words a pair: (2n(p-1) + 5n(P-p)/2) / P.
    """
    core = 1 << (ranks.bit_length() - 1)
    return (2 * length * (core - 1) + 2.5 * length * (ranks - core)) / ranks


def topka_words(k: int, ranks: int) -> float:
    """Words per rank of TopkA and Gaussiank: an allgather of k entries from every rank."""
    return 2.0 * k * (ranks - 1)


def gtopk_words(k: int, ranks: int) -> float:
    """Words per rank of gTopk, averaged over the ranks: every rank but rank 0 sends k entries up and gets k back."""
    return 4 * k * (ranks - 1) / ranks


def gtopk_busiest_words(k: int, ranks: int) -> float:
    """Words that rank 0 sends in gTopk's broadcast; it receives as many on the way up, so that 4k·ceil(log2 P) pass it."""
    return 2.0 * k * (ranks - 1).bit_length()


def topkdsa_words(k: int, length: int, ranks: int) -> tuple[float, float]:
    """The least and the most words per rank of TopkDSA, averaged over the ranks.

    2k(P-1)/P to split, and to gather 2k(P-1)/P where all supports coincide, at most n(P-1)/P where every region is dense.
    """
    share = (ranks - 1) / ranks
    return 4 * k * share, max(4 * k, 2 * k + length) * share
