"""The doctor: whatever a process that tries something does, the doctor says it in a sentence and lives."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import collectives
from oktopk.doctor import __main__ as doctor
from oktopk.doctor import children, machine
from oktopk.doctor.children import alone, as_given, attempt, how_it_ended, mpi_starter, torch_starter
from oktopk.doctor.verdict import BEST, CANNOT, SLOWER
from oktopk.launch import LaunchError
from tests.oktopk.doctor.test_verdict import gpu_host

ROOT = Path(__file__).resolve().parents[3]


def probe(folder: Path, body: str) -> list[str]:
    """A stand-in for the probe, as what follows `python -m mpi4py`."""
    script = folder / "probe.py"
    script.write_text(
        "import json, os, signal, sys, time\nwhat, path = sys.argv[1:]\n"
        "def write(number, **found): open(f'{path}.{number}', 'w').write(json.dumps(found))\n" + body
    )
    return [str(script)]


MPI = "from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
TORCH = "rank = int(os.environ['RANK'])\n"


def two() -> children.Starter:
    command, environment = mpi_starter()
    return command, environment | {"MILK": "oat"}


@pytest.mark.parametrize(
    ("starter", "body", "sentence"),
    [
        (alone, "os.kill(os.getpid(), signal.SIGSEGV)", "a process died of SIGSEGV (a segmentation fault)"),
        (alone, "raise RuntimeError('no milk')", "ended with status 1: RuntimeError: no milk"),
        (alone, "pass", "rank(s) [0] ended without a word"),
        (alone, "write(0, problem='no sugar'); sys.exit(1)", "no sugar"),
        (alone, "write(0, problem='', cups=2)", {"problem": "", "cups": 2}),
        (alone, "time.sleep(60)", "did not end in 2 s, and was ended"),
        (two, "if rank: os.kill(os.getpid(), signal.SIGSEGV)\nMPI.COMM_WORLD.Barrier()", "died of SIGSEGV"),
        (
            two,
            "if rank:\n  write(1, problem='MemoryError: full')\n  raise MemoryError\nMPI.COMM_WORLD.Barrier()",
            "rank 1: MemoryError: full",
        ),
        (
            two,
            "write(rank, problem='', rank=rank, milk=os.environ['MILK'])",
            {"problem": "", "rank": 0, "milk": "oat"},
        ),
        (
            torch_starter,
            "if rank: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)",
            "a process died of SIG",
        ),
    ],
)
def test_however_one_process_or_two_ranks_end_it_is_a_sentence(
    tmp_path: Path, starter: Callable[[], children.Starter], body: str, sentence: str | dict[str, Any]
) -> None:
    before = {alone: "", two: MPI, torch_starter: TORCH}[starter]
    seconds, ranks = 2 if starter is alone and "sleep" in body else 60, 1 if starter is alone else 2
    found = attempt(starter(), "tea", seconds, ranks=ranks, probe=probe(tmp_path, before + body))
    if isinstance(sentence, str):
        assert found["problem"] == sentence if starter is alone else sentence in found["problem"]
    else:
        assert found == sentence


@pytest.mark.parametrize(
    ("starter", "body", "seconds"),
    [
        (mpi_starter, MPI + "{}\nif rank: MPI.COMM_WORLD.recv()\ntime.sleep(60)", 3),
        pytest.param(
            torch_starter,
            TORCH + "{}\ntime.sleep(60)",
            9,
            marks=pytest.mark.long("`make test` has two ranks of MPI that hang"),
        ),
    ],
)
def test_two_ranks_that_hang_are_ended_with_nothing_left(
    tmp_path: Path, starter: Callable[[], children.Starter], body: str, seconds: float
) -> None:
    write_pid = "open(f'{sys.argv[0]}.{rank}', 'w').write(str(os.getpid()))"
    began = time.monotonic()
    found = attempt(starter(), "tea", seconds, probe=probe(tmp_path, body.format(write_pid)))
    assert found["problem"] == f"did not end in {seconds} s, and was ended"
    assert time.monotonic() - began < 120
    pids = [
        int(text) for file in tmp_path.glob("probe.py.*") if (text := file.read_text())
    ]  # of those that started
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("status", "output", "sentence"),
    [
        (0, "signal 11", ""),
        (-9, "", "a process died of SIGKILL"),
        (139, "", "a process died of SIGSEGV (a segmentation fault)"),
        (1, "process rank 1 exited on signal 7 (Bus error).", "a process died of SIGBUS"),
        (
            1,
            "BAD TERMINATION\nterminated by signals sent by prterun",
            "ended with status 1: terminated by signals",
        ),
        (
            2,
            "Traceback\nValueError: density 2\n-----\nmpiexec: gone\n-----",
            "ended with status 2: ValueError: density 2",
        ),
        (255, "-----\n", "ended with status 255: nothing"),
    ],
)
def test_a_status_is_said_with_its_signal_or_its_error(status: int, output: str, sentence: str) -> None:
    assert how_it_ended(status, output).startswith(sentence)
    assert bool(sentence) == bool(how_it_ended(status, output))


def test_what_is_tried_starts_from_the_environment_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HOME": "/root", "OMPI_MCA_pml": "ucx", "OMPI_MCA_opal_common_ucx_tls": "tcp"}
    monkeypatch.setattr(collectives, "WITHOUT_CUDA_UCX", "no wheel")
    assert as_given(given) == given
    monkeypatch.setattr(collectives, "WITHOUT_CUDA_UCX", "")  # then loading it has set what is not set
    assert as_given(given) == {"HOME": "/root", "OMPI_MCA_opal_common_ucx_tls": "tcp"}


# launchers


def fake_srun(folder: Path, body: str) -> None:
    path = folder / "srun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def no_mpiexec() -> str:
    raise LaunchError("no mpiexec beside the interpreter nor on PATH")


def test_srun_takes_the_place_of_an_mpiexec_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "find_mpiexec", no_mpiexec)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(LaunchError, match=r"^no mpiexec .*; there is no srun either$"):
        mpi_starter()
    # --overlap -n 2 PYTHON -m mpi4py ...
    fake_srun(tmp_path, f'shift 6\nexec {sys.executable} -m jobs.launch -n 2 "$@"')
    with pytest.raises(LaunchError, match="needs an allocation: salloc -n 2 oktopk-doctor"):
        mpi_starter()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert mpi_starter()[0][0] == str(tmp_path / "srun")
    body = "write(rank, problem='', of=MPI.COMM_WORLD.size)"
    found = attempt(mpi_starter(), "tea", 40, probe=probe(tmp_path, MPI + body))
    assert found == {"problem": "", "of": 2}


def test_ranks_that_do_not_see_each_other_are_no_pair(tmp_path: Path) -> None:
    fake_srun(tmp_path, 'shift 3\n"$@" &\n"$@" &\nwait')
    starter = [str(tmp_path / "srun"), "--overlap", "-n", "2", sys.executable], dict(os.environ)
    found = attempt(starter, "host", 40)
    assert found["problem"].startswith("the launcher started processes that see 1 of each other, not 2")
    assert "srun --mpi=" in found["problem"]


# the whole


def test_a_gpu_host_is_examined_try_by_try(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, tried = gpu_host(), []
    answers = found["tried"] | {"gpus": found["gpu"], "cpu": {"problem": ""}, "mpi": {"problem": ""}}

    def attempted(starter: children.Starter, what: str, timeout: float, ranks: int = 2) -> dict[str, Any]:
        command, environment = starter
        if ranks > 1:
            tried.append((what, "torch.distributed.run" in command, environment.get("OKTOPK_CUDA_AWARE_MPI")))
        return dict(answers[what])

    monkeypatch.delenv("OKTOPK_CUDA_AWARE_MPI", raising=False)
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(children, "attempt", attempted)
    assert doctor.main(["--json", str(tmp_path / "found.json")]) == BEST
    on_host = [("host", False, None), ("host", True, None)]
    on_gpus = [("device", False, "1"), ("device", False, "0"), ("device", True, None), ("peer", False, "0")]
    assert tried == on_host + on_gpus
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["gpu"]["devices"] == found["gpu"]["devices"]
    assert written["path"].startswith("peer memory") and written["status"] == BEST
    assert "GPUs 0 and 1" in capsys.readouterr().out
    (tmp_path / "link.json").symlink_to(tmp_path / "found.json")
    assert doctor.main(["--json", str(tmp_path / "link.json")]) == 2
    assert "link.json" in capsys.readouterr().err
    tried.clear()
    found["gpu"]["problem"] = "there is no GPU"
    assert doctor.main([]) == SLOWER
    assert tried == on_host, "a GPU that cannot be used was tried"
    assert "not usable: there is no GPU" in capsys.readouterr().out
    tried.clear()
    answers["host"] = {"problem": "no milk"}
    assert doctor.main([]) == CANNOT
    assert tried == on_host, "more was tried by what starts no ranks"


@pytest.mark.skipif(machine.has_driver(), reason="has a GPU")
def test_a_machine_without_gpu_is_told_that_its_cpu_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oktopk.doctor", "--json", str(tmp_path / "found.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,  # where the cache of kernels is empty
        check=False,
    )
    assert done.returncode == BEST, done.stdout + done.stderr
    assert "none: this host has no NVIDIA driver, and runs on the CPU" in done.stdout
    assert "path: CPU, MPI (the best that this hardware allows)" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("host", "gloo"):
        assert found["tried"][name]["problem"] == ""
        assert 1e-8 < found["tried"][name]["latency"] < 1


def test_without_a_launcher_it_says_so_and_leaves_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "find_mpiexec", no_mpiexec)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(children, "torch_starter", lambda: (["/nowhere/python"], {}))
    assert doctor.main([]) == CANNOT
    out = " ".join(capsys.readouterr().out.split())
    assert "no mpiexec beside the interpreter nor on PATH; there is no srun either" in out
    assert "several ranks cannot run like this" in out
