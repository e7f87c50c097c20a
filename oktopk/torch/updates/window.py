"""What the steps since the last exchange of updates leave for the next one."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from oktopk.damage import StateError
from oktopk.torch.local_step import LocalStep

_FIRST, _EVERY = 20, 10


class Window:
    """The steps between two exchanges, and the exchanges so far. Only the optimizer writes to it.

    Args:
        every: steps between two exchanges.
        parameters: how many there are.
        local: keeps the decay that is due in the next exchange.

    Attributes:
        exchanges: so far, with those that were skipped or raised.
        failed: whether the last one has raised, on all ranks.
        steps: since the last exchange.
        present: for each parameter 1 if it has had a gradient since then, else 0.
        whole: whether in this step each parameter has a gradient.
        selected: whether this step's moves are not in the parameters: the exchange computes them.
        broken: whether a gradient was not finite, and all ranks are to raise.
        problem: of a step, for the exchange to raise, in a sentence; "" if there is none.
        raised: what the optimizer has raised on this rank.
        took_writes: whether a step has taken what was written into parameters outside of `agreed`.
        written: whether something else has, or a step whose exchange did not compare the ranks' references.
    """

    def __init__(self, every: int, parameters: int, local: LocalStep) -> None:
        self.every, self._parameters, self._local = every, parameters, local
        self.exchanges, self.failed = 0, False
        self.begin()

    def begin(self) -> None:
        """No step has been taken since the last exchange."""
        self.steps, self.problem = 0, ""
        self.raised: Exception | None = None
        self.whole = self.selected = self.broken = self.took_writes = self.written = False
        self.present = bytearray(self._parameters)
        self._local.begin_window()

    def end(self, moved: bool = True, compared: bool = True) -> None:
        """Count an exchange, and begin anew.

        Args:
            moved: False where the parameters still hold what steps have moved.
            compared: False where the ranks' references were not compared, as where it was skipped or has raised.
        """
        present, written = self.present, self.took_writes or self.written
        self.exchanges += 1
        self.begin()
        self.written = written and not compared
        if not moved:
            self.present = present

    def add(self, present: Iterable[bool]) -> None:
        """Note which parameters have a gradient in this step."""
        self.present = bytearray(map(operator.or_, self.present, present))

    def count_step(self) -> bool:
        """Count a step and its decay, whether this replica has stepped or not. Returns whether an exchange is due."""
        self.steps += 1
        self._local.count_decay()
        return self.steps >= self.every

    @property
    def is_first_step(self) -> bool:
        """Whether no step has been taken yet."""
        return not (self.exchanges or self.steps)

    @property
    def renews(self) -> bool:
        """Whether the ratio and the hash of the reference are new in the next exchange: in the first 20, then in every tenth."""
        return self.exchanges < _FIRST or self.exchanges % _EVERY == 0

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        counts = {"steps": self.steps, "exchanges": self.exchanges}
        return counts | {"present": list(self.present), "factors": self._local.factors}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise StateError, or what `state_errors` takes for one, for what `load` does not take."""
        counts = state["steps"], state["exchanges"], len(state["present"]), len(state["factors"])
        wanted = self._parameters, len(self._local.factors)
        if counts[2:] != wanted or not 0 <= counts[0] < self.every or counts[1] < 0:
            raise StateError(
                f"the state has {counts[2]} parameters in {counts[3]} groups, {counts[0]} steps after an exchange; the optimizer "
                f"has {wanted[0]} in {wanted[1]} and exchanges every {self.every}"
            )

    def load(self, state: dict[str, Any]) -> None:
        """Take the steps since the last exchange from a state that was checked; not `exchanges`."""
        self.steps, self.present = state["steps"], bytearray(state["present"])
        self._local.factors = list(state["factors"])
