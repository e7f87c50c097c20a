"""examples/ work as they are on two ranks or four. Blocks of code in README and docs, in `make test` too: test_blocks.py.

Without the extra `examples` nine are skipped, and fail where CI is set: `make` installs it there.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launched import PATIENCE, ROOT, run_ranks, run_torchrun

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_SEVERAL_RANKS = ("hsdp", "hosts", "summed_hosts")  # two replicas of two
OF_BYTES = "CHANGELOG.md --steps 240 --layers 2 --hidden 64 --length 64 --batch 16 --rate 3e-3"


def missing_libraries(source: str) -> list[str]:
    """What a program imports and this environment lacks."""
    names = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    names += ["accelerate"] * ("import Trainer" in source)  # which that of transformers needs
    return [name for name in names if find_spec(name) is None]


@pytest.mark.long(
    "starts ranks; `make test` has the blocks of README and docs, and tests of what examples show"
)
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_does_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    most = 90 if path.stem == "language_model" else 40  # with its own network, schedule and evaluation
    assert len([line for line in lines if line.strip()]) < most
    if names := missing_libraries("\n".join(lines)):
        missing = f"{', '.join(names)} not installed: pip install -e '.[examples]'"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    ranks = 4 if path.stem in OF_SEVERAL_RANKS else 2
    given = OF_BYTES.split() if path.stem == "language_model" else []
    done = (run_torchrun if "torchrun" in "".join(lines[:3]) else run_ranks)(ranks, str(path), *given)
    assert done.returncode == 0, done.stderr
    assert "Warning: parameters on rank" not in done.stderr
    if path.stem == "own_method":
        assert re.findall(r"entry (\d+) becomes (\d+)", done.stdout)[-1] == ("900", "10")
        return
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    if path.stem.endswith("_updates"):
        assert "every rank has loaded the state of rank 0" not in done.stderr
        first, stopped, goes_on, last = losses
        assert stopped == goes_on
        losses = [first, last]
    if path.stem == "language_model":
        densely = run_torchrun(ranks, str(path), *given, "--dense")
        dense = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", densely.stdout)]
        assert densely.returncode == 0, densely.stderr
        # 3.2 is what frequencies of bytes alone give
        assert len(losses) == len(dense) == 4 and losses[-1] < 1.06 * dense[-1] < 2.9, done.stdout
        return
    assert len(losses) == 2 and losses[1] < 0.7 * losses[0], done.stdout
    if "ranks_per_host=" in "".join(lines):
        assert done.stdout.count(" of them to other hosts") == done.stdout.count(", 2 replicas") == 2, (
            done.stdout
        )
    if "ddp_hook" in "".join(lines):
        sent = re.findall(r"sent (\d\.\d+) words", done.stdout)
        assert 0 < float(sent[-1]) < 0.25, done.stdout
