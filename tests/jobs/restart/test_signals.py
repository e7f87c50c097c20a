"""Signals at any time: noted, shown, or ignored once the run has stopped as the first one asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs.restart.signals import EXIT_STATUS
from oktopk.launch import launch_environment

STOP_TWICE = """
import os, signal
from jobs.restart.signals import EXIT_STATUS, SignalNote, leave
# as the batch scripts start it
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1, signal.SIGUSR2}})
with SignalNote() as note:
    os.kill(os.getpid(), signal.{name})
    assert note.received == signal.{name}
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR2)
leave(EXIT_STATUS)
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_second_signal_does_not_kill_a_stopped_run(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOP_TWICE.format(name=name)],
        env=launch_environment(1, "unknown"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == EXIT_STATUS, done.stderr
    # the third one showed the stacks
    assert "most recent call first" in done.stderr
