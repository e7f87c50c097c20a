"""examples/ work as they are on two ranks or four. Blocks of code in README and docs: test_blocks.py.

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
LONG = {
    "ddp",
    "hsdp",
    "language_model",
    "own_method",
    "torchrun",
    "transformer",
}  # other tests start such ranks, or test what they show
STARTS_RANKS = "starts ranks; `make test` has tests of what it shows"
OF_BYTES = "CHANGELOG.md --steps 240 --layers 2 --hidden 64 --length 64 --batch 16 --rate 3e-3"
LIBRARIES = {
    "accelerate_hook": "accelerate",
    "accelerate_loop": "accelerate",
    "accelerate_updates": "accelerate",
    "hf_hook": "accelerate",
    "hf_trainer": "accelerate",
    "hf_updates": "accelerate",
    "lightning_hook": "pytorch_lightning",
    "lightning_trainer": "pytorch_lightning",
    "lightning_updates": "pytorch_lightning",
}


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.long(STARTS_RANKS)] * (path.stem in LONG | {*LIBRARIES}))
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_an_example_is_short_and_does_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    # with a class to copy; with its own network, schedule and evaluation
    most = 90 if path.stem.endswith("_updates") or path.stem == "language_model" else 40
    assert len([line for line in lines if line.strip()]) < most
    library = LIBRARIES.get(path.stem)
    if library is not None and find_spec(library) is None:
        missing = f"{library} is not installed: pip install -e '.[examples]'"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    ranks = 4 if path.stem == "hsdp" else 2
    given = OF_BYTES.split() if path.stem == "language_model" else []
    done = (run_torchrun if "torchrun" in "".join(lines[:3]) else run_ranks)(ranks, str(path), *given)
    assert done.returncode == 0, done.stderr
    assert "Warning: parameters on rank" not in done.stderr
    if path.stem == "own_method":
        assert re.findall(r"entry (\d+) becomes (\d+)", done.stdout)[-1] == ("900", "10")
        return
    if path.stem.endswith("_updates"):
        for sentence in ("alike on all ranks", "goes on bit for bit"):
            assert done.stdout.count(f"{sentence}: True") == ranks, done.stdout
        assert "every rank has loaded the state of rank 0" not in done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    if path.stem == "language_model":
        densely = run_torchrun(ranks, str(path), *given, "--dense")
        dense = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", densely.stdout)]
        assert densely.returncode == 0, densely.stderr
        # 3.2 is what frequencies of bytes alone give
        assert len(losses) == len(dense) == 4 and losses[-1] < 1.06 * dense[-1] < 2.9, done.stdout
        return
    assert len(losses) == 2 and losses[1] < 0.7 * losses[0], done.stdout
    if "ddp_hook" in "".join(lines):
        sent = re.findall(r"sent (\d\.\d+) words", done.stdout)
        assert 0 < float(sent[-1]) < 0.25, done.stdout
