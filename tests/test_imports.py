"""The house has one direction of imports, so that every file knows its floor."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oktopk

ROOT = Path(__file__).resolve().parent.parent

# package -> the packages of this house that it may import
FLOORS: dict[str, set[str]] = {
    "collectives": set(),
    "oktopk": {"collectives"},
    "models": set(),
    "data": set(),
    "jobs": {"models", "data", "oktopk", "collectives"},
}
# what runs as a program of its own
PROGRAMS = {ROOT / "oktopk" / "doctor" / "probe.py"}
# package -> what it must do without
WITHOUT: dict[str, set[str]] = {
    "collectives": {"torch", "h5py", "pydantic", "sklearn", "matplotlib"},
    "oktopk": {"h5py", "pydantic", "sklearn", "matplotlib", "tqdm"},
    "models": {"mpi4py", "h5py"},
    "data": {"mpi4py"},
    "jobs": set(),
}


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of all modules that a module imports, wherever in it, relative imports resolved."""
    parts = module.split(".")
    package = parts if is_package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            found = [*base, *(node.module.split(".") if node.module else [])]
            # `from .. import x` and `from house import x` may name modules
            yield from (".".join([*found, name.name]) for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def modules_of(path: Path) -> frozenset[str]:
    """Absolute names of all modules that a file imports."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    is_package = path.name == "__init__.py"
    return frozenset(imported_modules(path.read_text(encoding="utf-8"), name, is_package))


def imports_of(path: Path) -> set[str]:
    return {imported.split(".")[0] for imported in modules_of(path)}


@pytest.mark.parametrize("package", FLOORS)
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    files = files_of(package)
    assert files, f"{package} has no files: has the house changed?"
    forbidden = (set(FLOORS) | {"tests"}) - FLOORS[package] - {package} | WITHOUT[package]
    found = {str(path.relative_to(ROOT)): imports_of(path) & forbidden for path in files}
    for name in ("process_group", "process_group_cuda"):  # a library as MPI is
        assert found.pop(f"collectives/{name}.py", {"torch"}) == {"torch"}
    assert found.pop("oktopk/plan/picture.py", {"matplotlib"}) == {"matplotlib"}  # where it is installed
    assert not {path: names for path, names in found.items() if names}


def test_every_package_of_the_house_has_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(FLOORS)


@pytest.mark.parametrize("package", ["collectives", "oktopk"])
def test_the_library_takes_its_communicator_from_the_caller(package: str) -> None:
    """All ranks of the job are the communicator where the caller gives None, which one function decides."""
    for path in (path for path in files_of(package) if path not in PROGRAMS):
        decides: list[ast.AST] = []
        if path == ROOT / "collectives" / "mpi.py":
            (function,) = (node for node in nodes_of(path) if getattr(node, "name", "") == "communicator")
            decides = list(ast.walk(function))
        names = [
            node.lineno
            for node in nodes_of(path)
            if (isinstance(node, ast.Attribute) and node.attr == "COMM_WORLD" and node not in decides)
            or (isinstance(node, ast.ImportFrom) and any(name.name == "COMM_WORLD" for name in node.names))
        ]
        assert not names, f"{path.relative_to(ROOT)} uses COMM_WORLD in lines {names}"


def test_all_that_jobs_print_is_escaped() -> None:
    """By `data.command.show`: text may come from a file."""
    for path in (path for package in ("jobs", "data") for path in files_of(package)):
        calls = [
            node.lineno
            for node in nodes_of(path)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        ]
        assert len(calls) == (path == ROOT / "data" / "command.py"), (
            f"{path.relative_to(ROOT)} prints in lines {calls}"
        )


def library_file(name: str) -> str:
    """The file of a module in this house, by its dotted name; "" if there is none."""
    path = ROOT.joinpath(*name.split("."))
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if name and file.is_file()]
    return str(found[0].relative_to(ROOT)) if found else ""


def imported_files(path: Path) -> set[str]:
    """The files of this house that a file imports, wherever in it; a name that is no module counts for its package."""
    found = {library_file(full) or library_file(full.rpartition(".")[0]) for full in modules_of(path)}
    return found - {""}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle, the first one again at the end; empty if there are none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for file in sorted(edges.get(path[-1], ())):
            if file in path:
                return [*path[path.index(file) :], file]
            if file not in done and (found := search([*path, file])):
                return found
        done.add(path[-1])
        return []

    return next((found for file in sorted(edges) if (found := search([file]))), [])


@pytest.mark.parametrize("package", FLOORS)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    edges = {str(path.relative_to(ROOT)): imported_files(path) for path in files_of(package)}
    assert any(edges.values()), "imports are not seen"
    assert not circle(edges)


def test_a_circle_is_seen() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert library_file("collectives.cuda") == "collectives/cuda/__init__.py"
    assert library_file("collectives.cuda.ucx.load_cuda_ucx") == ""


REFERENCE = "oktopk/reference.py"  # read alone, it uses nothing of this house
# what talks to a communication library; the other files use a Transport
TALK_TO_LIBRARIES = {REFERENCE} | {
    f"collectives/{name}.py"
    for name in ("connect", "mpi", "mpi_cuda", "process_group", "process_group_cuda", "cuda/ucx")
}


def test_the_reference_is_short_and_needs_numpy_and_mpi4py() -> None:
    path = ROOT / REFERENCE
    assert imports_of(path) == {"__future__", "numpy", "mpi4py"}
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("package", ["collectives", "oktopk"])
def test_only_transports_touch_mpi_and_communicators(package: str) -> None:
    found = []
    for path in files_of(package):
        file = str(path.relative_to(ROOT))
        annotations = [
            node.annotation if isinstance(node, ast.arg | ast.AnnAssign) else node.returns
            for node in nodes_of(path)
            if isinstance(node, ast.arg | ast.AnnAssign | ast.FunctionDef)
        ]
        allowed = {id(part) for annotation in annotations if annotation for part in ast.walk(annotation)}
        for node in nodes_of(path):
            if (
                file in TALK_TO_LIBRARIES
                or path in PROGRAMS
                or not isinstance(node, ast.Attribute)
                or id(node) in allowed
            ):
                continue
            if node.attr == "comm" or (isinstance(node.value, ast.Name) and node.value.id == "MPI"):
                found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    assert not found


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("import jobs.train", "oktopk.x", False, {"jobs.train"}),
        ("from .. import jobs", "oktopk.methods.x", False, {"oktopk.jobs"}),
        ("from ..sparse import y", "oktopk.methods.x", False, {"oktopk.sparse.y"}),
        ("from . import y", "oktopk", True, {"oktopk.y"}),
        ("from ...jobs import y", "oktopk.methods", True, {"jobs.y"}),
        ("def f():\n    from models import vgg", "oktopk.x", False, {"models.vgg"}),
        ("importlib.import_module('data.images.digits')", "oktopk.x", False, {"data.images.digits"}),
    ],
)
def test_imports_are_seen_in_every_form(
    source: str, module: str, is_package: bool, expected: set[str]
) -> None:
    assert set(imported_modules(source, module, is_package)) == expected


# Each program runs in a process that has imported torch and not MPI, and ends where it would import that.
BEFORE_MPI = """
import os, sys
import numba, torch

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            os._exit(0 if hasattr(sys.modules.get("collectives"), "WITHOUT_CUDA_UCX") else 3)

sys.meta_path.insert(0, Finder())
for program in sys.argv[1:]:
    if not (child := os.fork()):
        sys.argv[1:] = []
        exec(program)
        os._exit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
PROGRAMS_WITH_MPI = (
    "from oktopk import GradientAllreduce; GradientAllreduce(None, 10)",
    "import oktopk.torch.optimizer, torch; oktopk.average_buffers(torch.nn.BatchNorm1d(3))",
    "import jobs.train.__main__",
    "import jobs.bench.run",
    "from jobs.bench.__main__ import main; main(['--help'])",
    "import oktopk.doctor.probe as probe; probe.main(['host', 'nowhere'])",
    "import pytest; pytest.main(['--with-mpi', '-m', 'mpi', '--collect-only', 'tests/collectives/test_traffic.py'])",
)


def test_the_ucx_that_knows_cuda_is_loaded_before_mpi() -> None:
    """3: MPI comes before collectives has loaded UCX, 4: never."""
    done = run_python("-c", BEFORE_MPI, *PROGRAMS_WITH_MPI)
    statuses = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert dict(zip(PROGRAMS_WITH_MPI, statuses, strict=True)) == dict.fromkeys(PROGRAMS_WITH_MPI, "0"), (
        done.stderr
    )


def test_import_oktopk_is_enough_to_name_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("buckets", "elastic", "rows", "torch"):
        monkeypatch.delitem(vars(oktopk), module, raising=False)  # what an earlier import has set
    named = (
        oktopk.torch.ddp_hook,
        oktopk.elastic.redistribute,
        oktopk.buckets.bucket_ranges,
        oktopk.rows.RowReport,
    )
    assert [item.__module__.removeprefix("oktopk.") for item in named] == [
        "torch.ddp",
        "elastic",
        "buckets",
        "rows",
    ]
    monkeypatch.setattr(oktopk, "find_spec", lambda name: None)
    monkeypatch.delitem(vars(oktopk), "torch", raising=False)
    with pytest.raises(ImportError, match=re.escape("oktopk.torch needs torch: pip install 'oktopk[torch]'")):
        _ = oktopk.torch
    with pytest.raises(AttributeError, match="module 'oktopk' has no attribute 'torsch'"):
        _ = oktopk.torsch


PLAN = ["--link", "1gbit", "--latency", "50us", "--parameters", "2e6", "--compute-ms", "5", "--hosts", "2"]


@pytest.mark.parametrize(
    ("missing", "program"),
    [
        (
            ["mpi4py"],
            "import collectives.transport, collectives.dense_allreduce, collectives.process_group, oktopk.launch, "
            "oktopk.torch.optimizer, jobs.report.__main__, jobs.demo, jobs.watch",
        ),
        (
            ["torch", "cupy", "mpi4py", "matplotlib"],
            "import collectives.element_types, oktopk.bench.__main__; from oktopk.plan.__main__ import main; "
            f"assert main({[*PLAN, '--methods', 'union', '--densities', '0.0125', '--wires', 'int4']}) == 0",
        ),
        (
            ["torch", "cupy", "matplotlib", "sklearn", "pydantic", "h5py"],
            "import jobs.bench.__main__, jobs.bench.run",
        ),
        ([], "import oktopk.launch, oktopk.doctor.__main__"),  # none at all
    ],
    ids=["what starts no ranks", "the plan", "the bench", "the launcher and the doctor"],
)
def test_it_runs_where_these_packages_are_missing(missing: list[str], program: str) -> None:
    """None stands for an import that fails; -S leaves out all that is installed."""
    bare = [] if missing else ["-S"]
    done = run_python(*bare, "-c", f"import sys; sys.modules.update(dict.fromkeys({missing})); {program}")
    assert done.returncode == 0, done.stderr


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
