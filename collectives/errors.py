"""Errors that all ranks raise alike, and how the ranks agree on them.

- Outside of steps a `with` block of local work ends in an allgather of what went wrong: `together`
  for most calls, `together_or` for one kind of error, `agree` for arguments that must be equal.
- In a step no rank asks the others. A flag travels with the step's own messages, and where one is
  up all ranks raise FlaggedRanksError, or by `agree` the sentence of the rank that raised it.
- Ranks that do not come make all ranks raise MissingRanksError; `collectives.limit` has how.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collectives.cuda.environment import is_cuda_error

EVERY_RANK_CALLS = "Every rank must make this call"
"""What to do about a rank that did not come to a collective operation."""


class FlaggedRanksError(Exception):
    """Nothing of this exchange may be applied. Raised on all ranks alike, or on none.

    Attributes:
        ranks: those that raised their flag, before any payload was sent; empty where their sum is
            not finite.
    """

    def __init__(self, ranks: list[int]) -> None:
        overflow = "the sum over the ranks is not finite"
        super().__init__(f"flagged by ranks {ranks}" if ranks else overflow)
        self.ranks = ranks


class NoPeerMemoryError(RuntimeError):
    """A rank has no memory that the others can map, or no room for it.

    Raised on every rank alike, naming the ranks.
    """


class MissingRanksError(RuntimeError):
    """Ranks did not come to a collective operation within the time allowed.

    Raised on every rank, on a missing one when it comes.

    Args:
        what: they did not come to.
        ranks, seconds, advice: as in the message.
        did: what they did, for the message.

    Attributes:
        ranks: those that did not come in time.
    """

    def __init__(
        self, what: str, ranks: list[int], seconds: float, advice: str, did: str = "did not come"
    ) -> None:
        self._what, self._how = what, (seconds, advice, did)
        listed = ", ".join(map(str, ranks))
        super().__init__(
            f"{what}: rank(s) {listed} {did} within {seconds:g} s (the setting timeout). {advice}"
        )
        self.ranks = ranks

    def among(self, whom: str, numbers: list[int]) -> MissingRanksError:
        """The same of ranks that have other numbers for users.

        Args:
            whom: the ranks, for the message.
            numbers: of each rank, for users.
        """
        named = [numbers[rank] for rank in self.ranks]
        return MissingRanksError(f"{self._what}, of {whom}", named, *self._how)


class Caught:
    """What a `with` block raised, of CUDA or a compiler, too: kept, as the other ranks wait.

    Not kept is a MissingRanksError, which all ranks raise by themselves.

    Attributes:
        error: that was raised; None for none.
    """

    error: Exception | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *ignored: object) -> bool:
        if isinstance(error, Exception) and not isinstance(error, MissingRanksError):
            self.error = error
        return self.error is not None

    @property
    def sentence(self) -> str:
        """What the error says; "" for none."""
        return "" if self.error is None else str(self.error) or type(self.error).__name__


def refuse(sentence: str) -> None:
    """Raise ValueError with a sentence that is not ""."""
    if sentence:
        raise ValueError(sentence)


class AgreeingRanks(ABC):
    """Ranks that raise each other's errors. All of it is collective, and one allgather of objects.

    Attributes:
        size: how many there are (P).
        ranks: int[P], each rank's number in messages to users.
    """

    size: int
    ranks: list[int]

    @abstractmethod
    def allgather_objects(self, value: object) -> list[Any]:
        """Every rank's picklable value, by rank."""

    @contextmanager
    def together(self, *kinds: type[Exception]) -> Iterator[dict[str, Any]]:
        """Raise an error of any rank's `with` block on every rank, at its end. Collective.

        Args:
            kinds: of error that become a ValueError on the rank itself, too, as errors of memory
                and of CUDA do: RuntimeError, OSError and ImportError count as these. One of another
                kind stays what it is there.

        Yields:
            A dict to be filled with plain values that must be equal on all ranks.

        Raises:
            ValueError: as `agree`, on every rank alike but for those errors of another kind.
            MissingRanksError: of the block itself, at once: other ranks have not come.

        Traffic: an allgather of the errors and values.
        """
        alike: dict[str, Any] = {}
        with Caught() as caught:
            yield alike
        failed = caught.error
        try:
            self.agree(alike, caught.sentence)
        except ValueError as agreed:
            if failed is None or isinstance(failed, (MemoryError, *kinds)) or is_cuda_error(failed):
                raise agreed from failed
            raise failed from None

    @contextmanager
    def together_or(self, what: str, kind: type[Exception]) -> Iterator[None]:
        """As `together`, where all ranks then raise this kind of error, whatever the block raises.

        Args:
            what: the message begins with it.
        """
        with Caught() as caught:
            yield
        sentences = self.allgather_objects(caught.sentence)
        if any(sentences):
            named = zip(self.ranks, sentences, strict=True)
            texts = (f"rank {rank}: {text}" for rank, text in named if text)
            raise kind(f"{what}: {'; '.join(texts)}")

    def agree(self, alike: dict[str, Any], sentence: str = "") -> None:
        """Check at construction that all ranks pass the same arguments. Collective.

        Args:
            alike: name -> plain value; must be equal on all ranks.
            sentence: what is wrong with this rank's own arguments, empty if nothing is.

        Raises:
            ValueError: on every rank alike, naming the ranks that have such a sentence, or the name
                on which ranks disagree and each rank's value.
        """
        everyone = self.allgather_objects((sentence, alike))
        speakers: dict[str, list[int]] = {}  # equal sentences are reported once, by all their ranks
        for rank, (text, _) in enumerate(everyone):
            if text:
                speakers.setdefault(text, []).append(rank)
        if speakers:
            texts = (f"{self._listed(ranks)}: {text}" for text, ranks in speakers.items())
            raise ValueError("; ".join(texts))
        # of all ranks, not rank 0's alone: an argument that one rank lacks is a disagreement too
        for name in dict.fromkeys(name for _, values in everyone for name in values):
            passed = [[values[name]] if name in values else [] for _, values in everyone]
            if any(values != passed[0] for values in passed):
                texts = (repr(values[0]) if values else "not given" for values in passed)
                listed = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
                raise ValueError(f"ranks disagree on {name}: {listed}")

    def _listed(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        return "all ranks" if len(ranks) == self.size else f"ranks {', '.join(map(str, ranks))}"
