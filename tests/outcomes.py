"""A file that knows each test's state even when the job does not live to report it.

One line per change, `STATE TEST`, with the states started, passed, skipped and failed. A test whose last line
says started is the one that took the job down. A test that needs a GPU where there is none has the state without_gpu.
The workers of pytest-xdist append to one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

WITHOUT_GPU = "without_gpu"
_SEVERITY = ("passed", "skipped", "failed")


class OutcomeFile:
    """The pytest plugin that writes it."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed with the session
        self._worst = "passed"

    def _write(self, state: str, test: str) -> None:
        self._file.write(f"{state} {test}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("failed", report.nodeid or "collection")

    def leave_out(self, test: str) -> None:
        """Note a test that needs a GPU; there is none."""
        self._write(WITHOUT_GPU, test)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst = "passed"
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._worst = max(self._worst, report.outcome, key=_SEVERITY.index)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(self._worst, nodeid)

    def pytest_unconfigure(self) -> None:
        self._file.close()


def read_outcomes(path: Path) -> Mapping[str, str]:
    """Each test's last state: test id -> "started", "passed", "skipped", "failed" or WITHOUT_GPU. No file, no tests."""
    states: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            state, test = line.split(" ", 1)
            states[test] = state
    return states
