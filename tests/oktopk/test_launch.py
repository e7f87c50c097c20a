"""Starting ranks: the command and the environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from collectives.connect import mpi_problem
from oktopk import launch
from oktopk.launch import LaunchError, find_mpiexec, launch_environment, main, mpiexec_command, refuses_root


def test_a_command_goes_through_the_runner() -> None:
    argv, environment = mpiexec_command(3, ["-m", "a.b", "x.toml"])
    assert argv == [find_mpiexec(), "-n", "3", sys.executable, "-m", "mpi4py", "-m", "a.b", "x.toml"]
    assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    with pytest.raises(LaunchError, match="ranks 0 is not at least 1"):
        mpiexec_command(0, [])
    with pytest.raises(LaunchError, match="does not run"):
        mpiexec_command(1, [], mpiexec="/nonexistent/mpiexec")


def test_the_environment_has_what_is_needed_and_no_more() -> None:
    base = {"PATH": "/bin", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "PMI_SIZE": "4"}
    base["TORCHELASTIC_RUN_ID"] = "none"
    plain = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    local = {"OMPI_MCA_btl": "^tcp"}  # no ports
    free = {"PRTE_MCA_hwloc_default_binding_policy": "none"} | local
    full = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    crowded = free | full | {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}
    assert launch_environment(4, "unknown", cores=2, root=True, base=base) == plain
    assert launch_environment(4, "mpich", cores=2, root=True, base=base) == plain | {"UCX_TLS": "^tcp"}
    assert launch_environment(4, "mpich", base=base | {"UCX_TLS": "tcp,sm"})["UCX_TLS"] == "tcp,sm"
    assert launch_environment(1, "openmpi", cores=2, root=False, base=base) == plain | free
    assert launch_environment(1, "openmpi", cores=2, root=True, base=base) == plain | free | root
    assert launch_environment(1, "openmpi4", cores=2, root=False, base=base) == plain | local
    assert launch_environment(2, "openmpi", cores=2, root=False, base=base) == plain | free | full
    assert launch_environment(2, "openmpi4", cores=2, root=False, base=base) == plain | full | local
    assert launch_environment(4, "openmpi", cores=2, root=False, base=base) == plain | crowded
    bound = {"PATH": "/bin", "PRTE_MCA_hwloc_default_binding_policy": "core"}
    assert launch_environment(1, "openmpi", cores=2, root=False, base=bound) == plain | bound | local
    own = {
        "OMP_NUM_THREADS": "2",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "PMIX_MCA_gds": "hash",
        "OMPI_MCA_btl": "^ofi",
    }
    assert launch_environment(4, "openmpi", cores=2, root=False, base=own) == crowded | own


@pytest.mark.parametrize(
    ("version", "refuses"), [("mpiexec (Open MPI) 5.0.11", True), ("HYDRA build details", False)]
)
def test_a_launcher_that_refuses_root_is_known(
    version: str, refuses: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpiexec.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    names = "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name in names:  # it wants both
        assert refuses_root(str(mpiexec)) == refuses
        monkeypatch.setenv(name, "1")
    assert not refuses_root(str(mpiexec))


@pytest.mark.parametrize(
    ("words", "ranks", "program"),
    [
        (["-n", "3", "train.py", "-n", "5", "--help"], 3, ["train.py", "-n", "5", "--help"]),
        (["-n2", "-m", "my.module", "-h"], 2, ["-m", "my.module", "-h"]),
        (["--ranks=2", "train.py"], 2, ["train.py"]),
        (["--ranks", "4", "-m", "my.module"], 4, ["-m", "my.module"]),
    ],
)
def test_oktopk_run_becomes_the_mpiexec_it_describes(
    words: list[str], ranks: int, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str]]] = []

    def execve(path: str, argv: list[str], environment: Mapping[str, str]) -> None:
        assert environment["OMP_NUM_THREADS"]
        calls.append((path, argv))

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(launch, "library_problem", lambda: "")
    main(words)
    mpiexec = find_mpiexec()
    assert calls == [(mpiexec, [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", *program])]


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--help"], 0, "oktopk-run -n 4 train.py"),
        ([], 2, "required: -n/--ranks"),
        (["train.py"], 2, "required: -n/--ranks"),
        (["-n", "2"], 2, "no program: give a script, or -m and a module"),
        (["-n", "2", "-m"], 2, "no program"),
        (["-n", "two", "train.py"], 2, "invalid int value: 'two'"),
        (["-n", "0", "train.py"], 2, "oktopk-run: ranks 0 is not at least 1"),
        (["-n", "2", "--verbose", "train.py"], 2, "unrecognized arguments: --verbose"),
    ],
)
def test_oktopk_run_explains_itself_and_refuses_what_it_cannot_start(
    words: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == status
    printed = capsys.readouterr()
    assert sentence in " ".join((printed.out + printed.err).split())


NO_LIBRARY = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
SENTENCE = r"mpi4py finds no MPI library \(.+\): load the site's MPI module, or pip install 'oktopk\[mpi\]'"


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_without_an_mpi_library_the_message_names_the_extra() -> None:
    """Importing oktopk works; what uses MPI raises an ImportError of one line, and the commands leave with 2."""
    program = """
import sys, oktopk
print(oktopk.Settings().density, sorted(oktopk.METHODS)[0])
try:
    oktopk.GradientAllreduce(None, 10)
except ImportError as error:
    print(error, file=sys.stderr)
sys.argv[1:] = ["-n", "1", "nothing.py"]
from oktopk.launch import main
main()
"""
    done = run_python("-c", program, **NO_LIBRARY)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "0.01 dense\n"
    first, second = done.stderr.splitlines()
    without = r"\. Without MPI, .* torch\.distributed\.init_process_group\(\"gloo\"\) first"
    assert re.fullmatch(SENTENCE + without, first)
    assert re.fullmatch("oktopk-run: " + SENTENCE, second)


@pytest.mark.long("runs the doctor; `make test` has its verdict without MPI, and the sentence")
def test_without_an_mpi_library_the_doctor_names_the_extra() -> None:
    done = run_python("-m", "oktopk.doctor", **NO_LIBRARY)
    assert done.returncode == 1, done.stdout + done.stderr  # torchrun starts ranks all the same
    assert "path: CPU, torch process group" in done.stdout
    assert "pip install 'oktopk[mpi]'" in " ".join(done.stdout.split())


def test_without_mpi4pys_extension_or_an_mpiexec_the_message_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: dict[str, Any] = {"mpi4py.MPI": None}  # as an import that fails
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(sys, "modules", sys.modules | modules)
    assert re.fullmatch(SENTENCE, mpi_problem())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"no mpiexec beside .* nor on PATH: .* pip install 'oktopk\[mpi\]'"
    ):
        find_mpiexec()
