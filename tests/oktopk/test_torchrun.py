"""Ranks that torchrun starts, where there is no MPI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launched import PATIENCE, ROOT, run_torchrun

SCRIPT = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
sys.modules["mpi4py"] = sys.modules["mpi4py.MPI"] = None  # not to be imported
import hashlib, os, time
import numpy as np
import torch
import torch.distributed as dist
from collectives import limit
from oktopk import DistributedOptimizer, GradientAllreduce, MissingRanksError

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 7))
optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), density=0.05, sends="gradients")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
line = " ".join(["trained", optimizer.reducer.transport.library, hashlib.sha1(values).hexdigest()])
os.write(1, (line + "\\n").encode())  # at once: lines of ranks do not mix
if "late" in sys.argv:
    limit.ANSWER = 1.0
    reducer = GradientAllreduce(None, 100, timeout=3.0)
    if dist.get_rank() == 1:
        time.sleep(9.0)  # the other one has given up, and its process has ended
    try:
        reducer.step(np.ones(100, np.float32))
    except MissingRanksError as error:
        os.write(1, (f"missed {{error.ranks}}\\n").encode())
    os._exit(0)
"""


def trained(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_torchrun(2, str(script), *arguments)


@pytest.mark.timeout(PATIENCE)
def test_torchrun_trains_to_equal_parameters_without_mpi(tmp_path: Path) -> None:
    """The script leaves without closing anything, and still ends."""
    done = trained(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("trained gloo")]
    assert len(lines) == 2 and len(set(lines)) == 1, done.stdout


@pytest.mark.long("waits until the others have ended; `make test` has a rank that does not come")
@pytest.mark.timeout(PATIENCE)
def test_a_rank_that_comes_after_the_others_ended_learns_it_was_late(tmp_path: Path) -> None:
    done = trained(tmp_path, "late")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("missed [1]") == 2, done.stdout


LATE_OPERATION = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
import faulthandler, gc, os, time
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, as frameworks do: the defaults of its functions would keep that
from torch.nn.parallel import DistributedDataParallel
from oktopk import DistributedOptimizer
from oktopk.frameworks.agreement import Agreement

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), density=0.2)
agreement = Agreement([optimizer], 2)
agreement.watch(model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
agreement.end()
del agreement, optimizer
gc.collect()
gathered = [torch.empty(4) for _ in range(2)]
time.sleep(dist.get_rank())  # on rank 0 the operation ends once the program has left the group
work = dist.all_gather(gathered, torch.ones(4), async_op=True)
if dist.get_rank() == 1:
    work.wait()
del work, gathered  # a thread of gloo's alone has them
faulthandler.dump_traceback_later(20, exit=True)
dist.destroy_process_group()
del model
os.write(1, b"ended\\n")
"""


@pytest.mark.long("two ranks of torchrun; `make test` does not force this defect of torch")
@pytest.mark.timeout(PATIENCE)
def test_a_ddp_that_frameworks_made_may_outlive_its_process_group(tmp_path: Path) -> None:
    """Else torch's Reducer ends the group with the interpreter's lock, which a thread of gloo's waits for."""
    script = tmp_path / "ends.py"
    script.write_text(LATE_OPERATION)
    done = run_torchrun(2, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == 2
