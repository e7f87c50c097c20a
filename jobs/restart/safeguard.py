"""Guards the steps of a run: checkpoints, signals and watchdog behind one call per step."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from jobs.restart.checkpoint import Checkpointer, Due
from jobs.restart.signals import Interrupted, SignalNote
from jobs.restart.watchdog import Phase, Watchdog
from jobs.run.file import RunFileError
from jobs.train.agreement import NonFiniteLossError, RanksDiverged
from oktopk import NonFiniteGradientError

Capture = Callable[[], tuple[dict[str, Any], dict[str, Any]]]

# raised on every rank alike
_TOGETHER = (NonFiniteGradientError, NonFiniteLossError, RanksDiverged, RunFileError, Interrupted)


class Safeguard:
    """Guards the steps of a run; a context manager around them.

    Args:
        checkpointer: writes the checkpoints.
        note: that the checkpointer asks for signals.
        watchdog: of the job, told what comes next.
    """

    def __init__(self, checkpointer: Checkpointer, note: SignalNote, watchdog: Watchdog) -> None:
        self._checkpointer, self._note, self._watchdog = checkpointer, note, watchdog

    def after_step(self, done: int, *, last: bool, capture: Capture, before: Callable[[], object]) -> None:
        """Do what is due after step number `done`; collective.

        Args:
            last: the run is complete with this step.
            capture: (common, own) state, see jobs.restart.state.
            before: brings the record of the run up to this step; collective.

        Raises:
            Interrupted: a signal asked to stop; the checkpoint is valid.
            CheckpointError: one could not be written.
        """
        self._watchdog.tick(done)
        due = self._checkpointer.due(done, last=last)
        if due is Due.NOTHING:
            return
        before()
        if last or due is Due.STOP:
            self._watchdog.enter(Phase.WAITING)
            self._checkpointer.save(done, *capture(), wait=True)
            self._watchdog.enter(Phase.STEPPING)
        else:
            self._checkpointer.save(done, *capture())
            self._watchdog.move()
        if due is Due.STOP:
            raise Interrupted(self._checkpointer.stop_signal, done)

    def before_evaluation(self) -> None:
        """An evaluation comes next, which may take longer than a step."""
        self._watchdog.enter(Phase.EVALUATING)

    def __enter__(self) -> Self:
        self._note.__enter__()
        self._watchdog.enter(Phase.STEPPING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note.__exit__(kind, error, trace)
        if kind is None or issubclass(kind, _TOGETHER):
            self._watchdog.enter(Phase.WAITING)
            self._checkpointer.close()
        self._watchdog.enter(Phase.ENDING)
