"""What is wrong with a state, in the sentence that users read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class StateError(ValueError):
    """A state cannot be loaded on this rank."""


@contextmanager
def state_errors(before: str = "", what: str = "the state is damaged: ") -> Iterator[None]:
    """Make a StateError of what goes wrong in a `with` block that reads a state, and put `before` before its sentence.

    Args:
        what: begins the sentence of an error that is no StateError.
    """
    try:
        yield
    except StateError as error:
        raise StateError(f"{before}{error}") from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{before}{what}{type(error).__name__} {error}") from error
