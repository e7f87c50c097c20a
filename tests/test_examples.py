"""examples/ work as they are on two ranks or four, README's loop on one.

Without the extra `examples` six are skipped, and fail where CI is set: `make` installs it there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launched import PATIENCE, ROOT, run_alone, run_ranks, run_torchrun

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONG = {
    "ddp",
    "fsdp2",
    "own_method",
    "torchrun",
    "transformer",
}  # other tests start such ranks, or test what they show
LIBRARIES = {
    "accelerate_hook": "accelerate",
    "accelerate_loop": "accelerate",
    "hf_hook": "accelerate",
    "hf_trainer": "accelerate",
    "lightning_hook": "pytorch_lightning",
    "lightning_trainer": "pytorch_lightning",
}


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (path.stem in LONG | {*LIBRARIES})) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_is_short_and_does_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) < 40
    library = LIBRARIES.get(path.stem)
    if library is not None and find_spec(library) is None:
        missing = f"{library} is not installed: pip install -e '.[examples]'"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    ranks = 4 if path.stem == "fsdp2" else 2
    done = (run_torchrun if "torchrun" in lines[0] else run_ranks)(ranks, str(path))
    assert done.returncode == 0, done.stderr
    assert "Warning: parameters on rank" not in done.stderr
    if path.stem == "own_method":
        assert re.findall(r"entry (\d+) becomes (\d+)", done.stdout)[-1] == ("900", "10")
        return
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < 0.7 * losses[0], done.stdout
    if "ddp_hook" in "".join(lines):
        sent = re.findall(r"sent (\d\.\d+) words", done.stdout)
        assert 0 < float(sent[-1]) < 0.25, done.stdout


def test_readmes_loop_runs_after_its_imports_were_sorted(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```diff\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    loop = "\n".join(line[1:] for line in block[1].splitlines())
    first, _, rest = loop.partition("\n\n")
    setting = "Net, loss = lambda: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss\n"
    setting += "my_ranks_batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]\n"
    script = tmp_path / "train.py"
    # with what import sorters put before oktopk
    script.write_text(f"from mpi4py import MPI\n{first}\n\n{setting}{rest}\nprint(optimizer.report.step)\n")
    sort = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I", "--fix", "-q", str(script)]
    subprocess.run(sort, check=True)
    imports = [line for line in script.read_text().splitlines() if "import" in line]
    assert [line.split()[1] for line in imports] == ["torch", "mpi4py", "oktopk"]
    done = run_alone(str(script))  # on two ranks: test_wheel.py
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"]
    assert "mpi4py.MPI was imported" not in done.stderr
