"""Several ranks, one report.

Rank 0 alone reports, and a test fails if it fails on any rank, with the traceback of each rank that failed.
The ranks agree on the outcome of every phase of every test, so that a failure or a skip on one of them cannot
leave it a test ahead of the others; under hypothesis they agree on every example, so that all of them shrink
the same failure.

A rank that failed while the others wait for it inside a collective operation cannot be joined: it waits a
little for them, then prints its traceback and ends the job. A test over its time ends the job too, after each
rank has said where it is.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis.errors import StopTest, UnsatisfiedAssumption
from mpi4py import MPI

Answers = Sequence[tuple[str, str]]  # (outcome, text) of each rank, in rank order


class OneReport:
    """The pytest plugin; registered by conftest.py when there are several ranks.

    Args:
        comm: all ranks of the job.
        patience: seconds that a rank which failed waits for the others.
    """

    def __init__(self, comm: MPI.Intracomm, patience: float) -> None:
        # Ours alone: no message of a test can be taken for one of these, even after it failed half-way.
        self._comm = comm.Dup()
        self._rank = comm.rank
        self._patience = patience
        self._test = "no test"
        self._unheard = ""  # a failure that the other ranks have not been told yet
        self._collection_errors: list[str] = []
        self._session: pytest.Session | None = None

    # Agreement

    def _agree(self, place: str, outcome: str, text: str = "") -> Answers:
        """What every rank has to say at one place. Collective; ranks at different places end the job."""
        self._unheard = f"{place}: {outcome}\n{text}" if outcome != "passed" else ""
        give_up = time.monotonic() + self._patience if self._unheard else float("inf")
        digest = hashlib.blake2b("\0".join((place, outcome, text)).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "big")
        own, largest = np.array([number, -number]), np.empty(2, np.int64)
        everyone_is_here = self._comm.Iallreduce(own, largest, MPI.MAX)
        looks = 0
        while not everyone_is_here.Test():
            if time.monotonic() > give_up:
                self._end_job(f"{self._unheard}\nThe other ranks did not come here in {self._patience:g} s.")
            looks += 1
            time.sleep(0 if looks < 20 else 0.0005)  # there may be more ranks than cores
        if largest[0] == -largest[1]:  # all ranks say the same, as nearly always
            self._unheard = ""
            return [(outcome, text)] * self._comm.size
        answers = self._comm.allgather((place, outcome, text))
        self._unheard = ""
        if any(where != place for where, _, _ in answers):
            self._end_job(f"The ranks are not at the same place. This one: {place}, {outcome}\n{text}")
        return [(outcome, text) for _, outcome, text in answers]

    def _say(self, text: str) -> None:
        # One write to what was standard error before pytest captured it: lines of two ranks do not mix.
        plain = "\n".join(f"[rank {self._rank}] {line}" for line in text.splitlines())
        os.write(self._stderr, f"\n{plain}\n".encode())

    def _end_job(self, text: str) -> NoReturn:
        self._say(text)
        time.sleep(1.0)  # the others may have something to say as well
        MPI.COMM_WORLD.Abort(1)
        raise SystemExit(1)

    # Session

    def pytest_configure(self, config: pytest.Config) -> None:
        self._stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
        if self._rank > 0:
            config.option.xmlpath = None

    def pytest_report_header(self) -> str:
        return f"{self._comm.size} ranks, {MPI.Get_library_version().splitlines()[0]}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        if self._rank > 0:
            session.config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        collected = "\n".join([*self._collection_errors, *(item.nodeid for item in session.items)])
        answers = self._agree("collection", "passed", collected)
        if any(answer != answers[0] for answer in answers):
            self._end_job(f"The ranks did not collect the same tests. This one:\n{collected}")

    def pytest_unconfigure(self) -> None:
        """Leave together: the first to exit with a failure takes the job, and rank 0's report, down."""
        if self._session is None:
            return
        sys.stdout.flush()
        status = int(self._session.exitstatus)
        usual = status in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        )
        answers = self._agree(
            "end of the session", "passed" if usual else "failed", f"pytest's status {status}"
        )
        if self._rank > 0 and all(answer == answers[0] for answer in answers):
            self._session.exitstatus = pytest.ExitCode.OK  # rank 0 says it

    # Tests

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: Any
    ) -> Generator[None, Any, pytest.TestReport]:
        report: pytest.TestReport = yield
        printed = (
            [f"--- {title} ---\n{content}" for title, content in report.sections] if report.failed else []
        )
        text = "\n".join([report.longreprtext, *printed])
        answers = self._agree(f"{report.when} of {item.nodeid}", report.outcome, text)
        outcomes = {outcome for outcome, _ in answers}
        if "failed" in outcomes:
            report.longrepr = failures_by_rank(answers)
            report.sections = []
        elif len(outcomes) > 1:
            skipped = [rank for rank, (outcome, _) in enumerate(answers) if outcome == "skipped"]
            report.longrepr = (
                f"skipped on ranks {skipped} only; a test must be skipped on all ranks or on none"
            )
        if "failed" in outcomes or len(outcomes) > 1:
            report.outcome = "failed"
        return report

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Make hypothesis' examples fail on all ranks together."""
        handles = {
            id(h): h for item in items if (h := getattr(getattr(item, "obj", None), "hypothesis", None))
        }
        for handle in handles.values():
            handle.inner_test = self._together(handle.inner_test, tuple(handle._given_kwargs))

    def _together(self, test: Callable[..., None], drawn: tuple[str, ...]) -> Callable[..., None]:
        @functools.wraps(test)
        def example(*args: Any, **kwargs: Any) -> None:
            text = ""
            try:
                test(*args, **kwargs)
            except (StopTest, UnsatisfiedAssumption):
                raise  # decided by what was drawn, so on every rank
            except Exception as error:
                text = "".join(traceback.format_exception(error))
            values = ", ".join(f"{name}={kwargs.get(name)!r}" for name in drawn)
            answers = self._agree(f"{self._test} with {values}", "failed" if text else "passed", text)
            if any(outcome == "failed" for outcome, _ in answers):
                raise AssertionError(failures_by_rank(answers))

        return example

    # Time, in place of pytest-timeout's own answer, which ends the job before the other ranks could speak

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        timer = threading.Timer(settings.timeout, self._out_of_time, (settings.timeout,))
        timer.daemon = True
        item.cancel_timeout = timer.cancel  # type: ignore[attr-defined] # where pytest-timeout looks for it
        timer.start()
        return True

    def _out_of_time(self, seconds: float) -> None:
        self._say(f"{self._test}: over its {seconds:g} s\n{self._unheard or where_the_main_thread_is()}")
        time.sleep(2.0)
        os._exit(1)


def failures_by_rank(answers: Answers) -> str:
    """The failures among the answers, the same text once for all the ranks that gave it."""
    # An object without a repr of its own shows its address, which is another one on every rank.
    address = re.compile(r" at 0x[0-9a-f]+")
    ranks: dict[str, list[int]] = {}
    for rank, (outcome, text) in enumerate(answers):
        if outcome == "failed":
            ranks.setdefault(address.sub(" at 0x...", text), []).append(rank)
    return "\n".join(
        f"--- failed on rank {', '.join(map(str, who))} of {len(answers)} ---\n{text}"
        for text, who in ranks.items()
    )


def where_the_main_thread_is() -> str:
    """Its stack, without the frames of pytest, and the error that it handles there, as a `finally` that waits for others does."""
    ident = threading.main_thread().ident
    if ident is None:
        return ""
    frames = traceback.extract_stack(sys._current_frames()[ident])
    own = [frame for frame in frames if not any(part in frame.filename for part in ("/_pytest/", "/pluggy/"))]
    stack = "".join(traceback.format_list(own[-12:]))
    handled: Any = sys._current_exceptions().get(ident)
    if isinstance(handled, tuple):  # before Python 3.12
        handled = handled[1]
    if handled is None:
        return stack
    return f"{stack}while it handles:\n{''.join(traceback.format_exception(handled))}"
