"""The batches of a run, epoch after epoch, from wherever an earlier job left off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.restart.state import Position
from jobs.train.loop import BatchStream


class Numbers:
    """A workload whose batches are (epoch, step)."""

    steps_per_epoch = 7

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        return ((epoch, step) for step in range(first_step, self.steps_per_epoch))


def stream(per_epoch: int, start: Position | None = None) -> Any:
    return BatchStream(Numbers(), 10, start or Position(), per_epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize("per_epoch", [7, 6, 1])
def test_an_epoch_ends_where_it_is_said_to(per_epoch: int) -> None:
    batches = stream(per_epoch)
    taken = [next(batches) for _ in range(2 * per_epoch)]
    assert taken == [(epoch, step) for epoch in range(2) for step in range(per_epoch)]
    assert batches.count == 2 * per_epoch


@pytest.mark.parametrize("per_epoch", [7, 6])
def test_a_stream_continues_at_any_position_that_another_had(per_epoch: int) -> None:
    whole = stream(per_epoch)
    for _ in range(2 * per_epoch + 3):
        resumed = stream(per_epoch, whole.position)
        assert resumed.count == whole.count
        assert next(resumed) == next(whole)
        assert resumed.position == whole.position


def test_past_an_epochs_end_the_next_begins() -> None:
    assert next(stream(6, Position(epoch=3, samples=65))) == (4, 0)
