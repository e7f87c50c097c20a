"""Ranks that torchrun starts, where there is no MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launched import PATIENCE, ROOT, run_torchrun

SCRIPT = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
sys.modules["mpi4py"] = sys.modules["mpi4py.MPI"] = None  # not to be imported
import hashlib, os
import torch
import torch.distributed as dist
from oktopk import DistributedOptimizer

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 7))
optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), density=0.05)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
line = " ".join(["trained", optimizer.reducer.transport.library, hashlib.sha1(values).hexdigest()])
os.write(1, (line + "\\n").encode())  # at once: lines of ranks do not mix
"""


@pytest.mark.timeout(PATIENCE)
def test_torchrun_trains_to_equal_parameters_without_mpi(tmp_path: Path) -> None:
    """The script leaves without closing anything, and still ends."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_torchrun(2, str(script))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("trained gloo")]
    assert len(lines) == 2 and len(set(lines)) == 1, done.stdout
