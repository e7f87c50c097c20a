"""A thread in which this rank communicates while the caller computes."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from collectives.closing import closes

_Result = TypeVar("_Result")


class CommunicationThread:
    """Runs calls one after the other, in the order in which they were submitted.

    Ranks that submit collective calls in one order run them in one order. After a call whose error leaves the ranks apart, later
    calls fail with the same error: they would wait for ranks that do not come.

    Args:
        name: of the thread.
        together: errors that every rank raises alike, after which the ranks may go on.
    """

    def __init__(self, name: str, together: tuple[type[BaseException], ...]) -> None:
        self._together = together
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        # that was submitted; weak, as its callbacks hold who submitted it
        self._last: Callable[[], Future[Any] | None] = lambda: None
        # a daemon: a process that fails must end, though this thread waits for other ranks
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Run a call after those before; the future has its result or its error.

        Raises:
            RuntimeError: `close` was called.
        """
        future: Future[_Result] = Future()
        self._last = weakref.ref(future)
        self._calls.put((future, call))
        return future

    def run(self, future: Future[_Result], call: Callable[[], _Result]) -> None:
        """Run a call now, in the caller's thread.

        Args:
            future: is given the result or the error.

        Raises:
            RuntimeError: `close` was called; or a call that was submitted has not ended.
            KeyboardInterrupt, SystemExit: came during the call; later calls fail.
        """
        if (last := self._last()) is not None and not last.done():
            raise RuntimeError("a call in the caller's thread while the communication thread runs others")
        self._run_next(future, call)
        if not isinstance(error := future.exception(), Exception | None):
            raise error

    @property
    def failed(self) -> BaseException | None:
        """The error that left the ranks apart, None where there was none."""
        return self._failed

    @closes
    def close(self) -> None:
        """End the thread after the calls that were submitted."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (submitted := self._calls.get()) is not None:
            self._run_next(*submitted)
            del submitted  # a result would live until the next call

    def _run_next(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            if self._failed is not None:
                raise self._failed
            result = call()
        except BaseException as error:
            if not isinstance(error, Exception):  # of a signal: to be raised once
                self._failed = self._failed or RuntimeError(
                    f"an earlier call was ended by {type(error).__name__}"
                )
            elif not isinstance(error, self._together):
                self._failed = error
            future.set_exception(error)
        else:
            future.set_result(result)
