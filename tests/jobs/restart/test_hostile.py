"""Checkpoints whose digests fit and whose contents are no state of the run: refused by name, and the older one is taken."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from jobs.restart import files
from jobs.restart.files import Manifest
from jobs.restart.packing import Snapshot
from jobs.restart.session import Found, find
from jobs.restart.state import Position, Progress, capture, restore
from jobs.train.reduce.reduction import apply, reduce
from oktopk import DistributedOptimizer
from oktopk.elastic import of_rank
from tests.training import flat, network, squares

pytestmark = pytest.mark.mpi

State = dict[str, Any]


class Run:
    """A model and its optimizer, and the states that were taken of them."""

    def __init__(self, comm: MPI.Intracomm, folder: Path, sends: str = "gradients") -> None:
        self.comm, self.folder = comm, folder
        self.model = network()
        adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        every = 1 + 2 * (sends == "updates")
        self.optimizer: Any = DistributedOptimizer(adam, comm, density=0.1, sends=sends, every=every)
        self.identity = {"model": "a model", "method": "oktopk", "length": self.optimizer.length}

    def train(self, step: int = 0) -> None:
        self.optimizer.zero_grad()
        squares(self.model, self.comm.rank, step).backward()
        reduce(self.optimizer, step)
        apply(self.optimizer)

    def states(self) -> tuple[State, State]:
        return capture(self.model, self.optimizer, Position(0, 8))

    def write(self, step: int, common: State, own: State, tree: str = "") -> Path:
        """A set of these states; the tree, if given, in the last rank's file."""
        draft = files.draft_folder(self.folder, step)
        parts = {}
        for name, state in ((files.rank_file(self.comm.rank), own), (files.COMMON, common)):
            if name != files.COMMON or self.comm.rank == 0:
                taken = Snapshot()
                taken.take(state)
                if tree and name == files.rank_file(self.comm.size - 1):
                    taken.tree = tree
                parts[name] = files.write_part(draft / name, taken)
        every = {name: part for theirs in self.comm.allgather(parts) for name, part in theirs.items()}
        if self.comm.rank == 0:
            content = {"config": {}, "step": step, "ranks": self.comm.size, "files": every}
            files.seal(
                self.folder, Manifest.model_validate({"format": files.FORMAT} | self.identity | content), 9
            )
        self.comm.barrier()
        return files.set_folder(self.folder, step)

    def resume(self, say: Callable[[str], object]) -> Progress:
        def use(found: Found) -> Progress:
            return restore(found, self.model, self.optimizer, self.comm, 0)

        resumed = find(self.comm, self.folder, self.identity, say, use)
        assert resumed is not None
        return resumed[1]


@pytest.fixture
def started(comm: MPI.Intracomm, tmp_path: Path) -> Run:
    return Run(comm, comm.bcast(tmp_path))


def put(state: State, path: str, value: Any) -> None:
    """Change what lies at a path; None: remove it."""
    *outer, last = (int(word) if word.isdigit() else word for word in path.split("/"))
    for word in outer:
        state = of_rank(state[word])  # type: ignore[index]
    if value is None:
        del state[last]  # type: ignore[arg-type]
    else:
        state[last] = value  # type: ignore[index]


# (which part, where in it, what is there), and what is said
HOSTILE: list[tuple[str, str, Any, str]] = [
    ("common", "model", None, "KeyError 'model'"),
    ("common", "model/0.weight", torch.ones(3), "RuntimeError"),
    ("common", "optimizer", {}, "the state is not that of an optimizer: KeyError"),
    ("own", "buffers/1.running_mean", torch.ones(2, 2), "RuntimeError"),
    ("own", "position", {"epoch": -1, "samples": 0}, "epoch=-1, samples=0.* is no place in the data"),
    ("own", "position/samples", 9, "the ranks have different positions in the data"),
    ("own", "random/torch", torch.ones(3), "TypeError|RuntimeError"),
    ("own", "reducer", None, "is damaged: KeyError 'residual'"),
    ("own", "reducer/residual", torch.ones(3), r"residual is float32\[3\], not float32"),
    ("tree", "", "[" * 5000, "holds no state: (RecursionError|JSONDecodeError)"),
    ("tree", "", json.dumps({"tensor": "nothing"}), "holds no state: KeyError 'nothing'"),
    ("tree", "", json.dumps({"pickle": "x"}), "holds no state: ValueError not a packed state"),
]


def test_a_set_that_is_no_state_is_refused_by_name(started: Run, comm: MPI.Intracomm) -> None:
    started.train()
    good = [copy.deepcopy(state) for state in started.states()]
    started.write(1, *good)
    for step, (part, path, value, problem) in enumerate(HOSTILE, start=2):
        common, own = copy.deepcopy(good)
        changed = {"common": common, "own": own if comm.rank == comm.size - 1 else {}, "tree": {}}[part]
        if part == "own" and comm.size == 1 and path == "position/samples":
            continue  # with whom should it disagree
        if changed:
            put(changed, path, value)
        newest = started.write(step, common, own, value if part == "tree" else "")
        said: list[str] = []
        for parameter in started.model.parameters():
            nn.init.zeros_(parameter)
        assert started.resume(said.append) == Progress(1, Position(0, 8))
        assert all(torch.equal(p, good[0]["model"][name]) for name, p in started.model.named_parameters())
        refused, aside = said
        assert f"checkpoint {newest} refused: " in refused and "\n" not in refused
        alone = part != "common" and comm.size > 1 and "different" not in problem
        assert re.search(f"rank {comm.size - 1}: .*" * alone + f"({problem})", refused), refused
        assert aside == f"checkpoint {newest} set aside as {newest.name}.refused"
    started.train()  # what was restored can go on


def test_ranks_that_step_alone_go_on_alone(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder = comm.bcast(tmp_path)
    run = Run(comm, folder, "updates")
    for step in range(4):  # one behind an exchange
        run.train(step)
    common, own = run.states()
    with run.optimizer.agreed():
        assert all(torch.equal(p, common["model"][name]) for name, p in run.model.named_parameters())
        together = flat(run.model).tobytes()
    assert set(comm.allgather(together)) == {together}
    assert comm.size == 1 or len(set(comm.allgather(flat(run.model).tobytes()))) > 1
    run.write(4, common, own)
    run.train(4)
    run.train(5)
    wanted = run.states()
    other = Run(comm, folder, "updates")
    assert other.resume(pytest.fail) == Progress(4, Position(0, 8))
    other.train(4)
    other.train(5)
    taken = [Snapshot(), Snapshot()]
    for snapshot, states in zip(taken, (wanted, other.states()), strict=True):
        snapshot.take(dict(zip(("common", "own"), states, strict=True)))
    assert taken[0].tensors.keys() == taken[1].tensors.keys()
    assert all(torch.equal(tensor, taken[1].tensors[name]) for name, tensor in taken[0].tensors.items())
