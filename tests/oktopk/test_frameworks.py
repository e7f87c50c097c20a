"""Lightning, the Hugging Face Trainer and Accelerate with updates: what `oktopk.frameworks` promises, where they are installed.

Without the extra `examples` the programs are skipped, and fail where CI is set, as in test_examples.py.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launched import PATIENCE, run_ranks, run_torchrun

PACKAGES = {
    "lightning": ["pytorch_lightning"],
    "transformers": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
}


def program(name: str) -> list[str]:
    """Its words, but for the folder."""
    if names := [package for package in PACKAGES[name] if find_spec(package) is None]:
        missing = f"{', '.join(names)} not installed: pip install -e '.[examples]'"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    words = ["-m", f"tests.frameworks.{name}_training"]
    return [*words, *PACKAGES[name]] if name == "lightning" else words


def findings(text: str, ranks: int) -> dict[str, list[str]]:
    """What each rank says of each promise."""
    found: dict[str, list[str]] = {}
    for what, is_so in re.findall(r"rank \d+: (.*?): (True|False)", text):
        found.setdefault(what, []).append(is_so)
    assert {len(said) for said in found.values()} == {ranks}
    return found


@pytest.mark.long("starts ranks that import a framework; `make test` has the states and `agreed`")
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("name", PACKAGES)
def test_a_training_evaluates_saves_and_goes_on_alike_on_any_number_of_ranks(
    name: str, tmp_path: Path
) -> None:
    words = program(name)
    for ranks, promises in ((2, 11 if name == "lightning" else 8), (3, 2)):
        done = run_torchrun(ranks, *words, str(tmp_path))
        assert done.returncode == 0, done.stderr
        found = findings(done.stdout, ranks)
        assert len(found) >= promises
        assert found == {what: ["True"] * ranks for what in found}
        for warning in ("has loaded the state of rank 0", "written to since", "reduces gradients"):
            assert warning not in done.stderr


@pytest.mark.long("as above")
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("name", PACKAGES)
def test_processes_that_a_framework_sees_alone_go_on_from_folders_of_their_own(
    name: str, tmp_path: Path
) -> None:
    words = program(name)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    done = run_ranks(2, *words, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = findings(done.stdout, 2)
    assert len(found) >= 7
    assert found == {what: ["True"] * 2 for what in found}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_framework_that_is_missing_is_named_with_its_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"oktopk.frameworks.{name}", raising=False)
    for missing in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers", "accelerate"):
        monkeypatch.delitem(sys.modules, missing, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("oktopk.frameworks.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"oktopk.frameworks.{name} needs {name}: pip install .*{name}"):
        importlib.import_module(f"oktopk.frameworks.{name}")
