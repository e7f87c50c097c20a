"""Calls in a thread and in the caller's: what becomes of one that fails."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from oktopk.worker import CommunicationThread


@pytest.fixture
def thread() -> Iterator[CommunicationThread]:
    made = CommunicationThread("test", together=(ValueError,))
    yield made
    made.close()


def raising(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call


def test_an_interrupt_reaches_the_caller_and_ends_later_calls(
    thread: CommunicationThread,
) -> None:
    first: Future[None] = Future()
    with pytest.raises(KeyboardInterrupt):
        thread.run(first, raising(KeyboardInterrupt()))
    assert first.done()
    later: Future[int] = Future()
    thread.run(later, lambda: 1)
    with pytest.raises(RuntimeError, match="ended by KeyboardInterrupt"):
        later.result()


def test_no_call_runs_beside_one_in_the_thread(thread: CommunicationThread) -> None:
    go_on = threading.Event()
    submitted = thread.submit(go_on.wait)
    with pytest.raises(RuntimeError, match="while the communication thread runs others"):
        thread.run(Future(), lambda: 1)
    go_on.set()
    submitted.result()
    now: Future[int] = Future()
    thread.run(now, lambda: 1)
    assert now.result() == 1


def test_what_a_callback_holds_does_not_live_until_the_next_call(thread: CommunicationThread) -> None:
    class Owner:
        def told(self, future: Future[int]) -> None:
            pass

    owner = Owner()
    future = thread.submit(lambda: 1)
    future.add_done_callback(owner.told)
    assert future.result() == 1
    thread.submit(lambda: 2).result()  # the thread has let go of the first
    held = weakref.ref(owner)
    del owner, future
    gc.collect()
    assert held() is None
