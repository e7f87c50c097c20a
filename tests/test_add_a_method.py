"""The method that docs/add-a-method.md adds works as the page says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import METHODS, GradientAllreduce
from oktopk.methods.topka import TopkA

pytestmark = pytest.mark.mpi
PAGE = Path(__file__).resolve().parent.parent / "docs" / "add-a-method.md"
LENGTH = 300


@pytest.fixture
def random_k(monkeypatch: pytest.MonkeyPatch) -> type[TopkA]:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    module: dict[str, Any] = {"__name__": "randomk"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), module)
    monkeypatch.setitem(METHODS, "randomk", module["RandomK"])
    found: type[TopkA] = module["RandomK"]
    return found


def test_the_method_of_the_page_is_short(random_k: type[TopkA]) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40


def test_the_method_of_the_page_loses_nothing_and_ranks_agree(
    comm: MPI.Intracomm, random_k: type[TopkA]
) -> None:
    reducer = GradientAllreduce(comm, LENGTH, "randomk", density=0.05, average=False)
    rng = np.random.default_rng(comm.rank)
    left = np.zeros(LENGTH, np.float32)
    for step in range(6):
        gradient = rng.integers(-50, 50, LENGTH).astype(np.float32)
        report = reducer.step(gradient)
        accumulated = comm.allreduce(gradient + left)
        left = np.array(reducer.residual)
        assert np.array_equal(accumulated, comm.allreduce(left) + reducer.update)
        assert len(set(comm.allgather(reducer.update.tobytes()))) == 1
        assert report.local_nnz == report.k == 15 and report.words == 2 * 15 * (comm.size - 1)
        if step == 3:
            state = reducer.state_dict()
            reducer = GradientAllreduce(comm, LENGTH, "randomk", density=0.05, average=False)
            without = copy.deepcopy(state)
            del without["methods"]["randomk"]["selection"]["seed"]
            with pytest.raises(ValueError, match="the state is damaged: KeyError 'seed'"):
                reducer.load_state_dict(without)
            reducer.load_state_dict(state)


def test_the_method_of_the_page_skips_what_is_not_finite(comm: MPI.Intracomm, random_k: type[TopkA]) -> None:
    reducer = GradientAllreduce(comm, LENGTH, "randomk", density=0.05, nonfinite="skip")
    gradient = np.ones(LENGTH, np.float32)
    if comm.rank == comm.size - 1:
        gradient[7] = np.nan
    assert reducer.step(gradient).skipped
    assert not reducer.update.any() and not np.any(reducer.residual)
