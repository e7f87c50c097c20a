"""States: what goes on from one has the bits of what was not interrupted, and a state that does not fit is loaded by no rank."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import METHODS, GradientAllreduce, levels
from oktopk.buckets import BucketedAllreduce
from oktopk.rows import RowSparseAllreduce
from tests.devices import get, need_gpus, on_gpus, put, use
from tests.rows import touched

pytestmark = [pytest.mark.mpi, pytest.mark.host_cuda(ranks=4)]
LENGTH, WIDTH = 2000, 3
LENGTHS = [700, 1, 1235, 64]
KINDS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS},
    "int4": {"wire": "int4"},
    "two levels": {"levels": "hosts", "ranks_per_host": 2},
    "union in two levels": {"levels": "hosts", "ranks_per_host": 2, "method": "union"},
    "buckets": {"lengths": LENGTHS},
    "table": {},
}


@pytest.fixture(autouse=True)
def several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "BLOCK", 64)


def made(comm: MPI.Intracomm, kind: str, device: str = "cpu") -> Any:
    use(device, comm)
    if kind == "table":
        return RowSparseAllreduce(comm, LENGTH, WIDTH, device=device)
    intervals = {"threshold_interval": 5, "boundary_interval": 4}
    make = BucketedAllreduce if kind == "buckets" else GradientAllreduce
    length = {} if kind == "buckets" else {"length": LENGTH}
    return make(comm, device=device, density=0.02, **intervals, **length, **KINDS[kind])


def step(reducer: Any, comm: MPI.Intracomm, device: str, number: int) -> list[bytes]:
    """Take a step on a gradient that its number tells, and return the bits that it leaves."""
    if isinstance(reducer, RowSparseAllreduce):
        given = touched(1000 * number + comm.rank, LENGTH, 30, WIDTH, "float32", False)
        report = reducer.step(put(device, given.rows), put(device, given.values))
        assert reducer.sum is not None
        left = [reducer.sum.rows, reducer.sum.values, np.int64(report.step)]
    else:
        gradient = (np.random.default_rng((comm.rank, number)).standard_normal(LENGTH) ** 3).astype(
            np.float32
        )
        if isinstance(reducer, BucketedAllreduce):
            reducer.step([put(device, part.copy()) for part in np.split(gradient, np.cumsum(LENGTHS)[:-1])])
            left = [*reducer.updates, reducer.gathered_residual()]
        else:
            reducer.step(put(device, gradient))
            left = [reducer.update, reducer.gathered_residual()]
    return [get(np.asarray(each) if np.isscalar(each) else each).tobytes() for each in left]


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        *(("cpu", kind) for kind in KINDS),
        # others go on from states of the host, and those from theirs, in test_executors.py
        *(pytest.param("cuda", kind, marks=on_gpus) for kind in ("gaussiank", *[*KINDS][-4:])),
    ],
)
def test_a_state_goes_on_bit_for_bit(comm: MPI.Intracomm, device: str, kind: str) -> None:
    """In a new reducer and in one that has taken other steps, and over exact steps and new regions."""
    if device == "cuda" and "levels" in kind:
        need_gpus(2)
    through, running, new = (made(comm, kind, device) for _ in range(3))
    for number in range(7):
        step(through, comm, device, number)
    step(running, comm, device, 99)
    for other in (running, new):
        other.load_state_dict(copy.deepcopy(through.state_dict()))
    for number in range(7, 13):
        bits = step(through, comm, device, number)
        assert [step(other, comm, device, number) == bits for other in (running, new)] == [True, True], number


def test_what_a_state_has_of_thresholds_are_plain_numbers(comm: MPI.Intracomm) -> None:
    reducer = made(comm, "oktopk")
    for number in range(3):
        step(reducer, comm, "cpu", number)
    learned = reducer.state_dict()["methods"]["oktopk"]
    for name in ("selection", "threshold"):
        assert json.loads(json.dumps(learned[name])) == learned[name]


LACKING = object()
# where a state is damaged, what stands there then, and what is said of it
DAMAGE: list[tuple[str, Any, str]] = [
    ("residual", LACKING, "the state lacks residual"),
    ("methods.oktopk.selection", LACKING, "the state is damaged: KeyError 'selection'"),
    ("methods.oktopk.selection.trend", LACKING, "the state is damaged: KeyError 'trend'"),
    ("methods.oktopk.selection.needs_exact", LACKING, "the state is damaged: KeyError 'needs_exact'"),
    ("methods.oktopk.threshold", LACKING, "the state is damaged: KeyError 'threshold'"),
    ("methods.oktopk.threshold.bits", LACKING, "the state is damaged: KeyError 'bits'"),
    ("methods.oktopk.threshold.bits", -5, "the global threshold of the state is not the bits of .*: -5"),
    ("methods.oktopk.selection.bits", 1.5, "the local threshold of the state is not the bits of .*: 1.5"),
    ("methods.oktopk.selection.trend", math.nan, "the trend of the local threshold .* not an integer: nan"),
    ("methods.oktopk.boundaries.-1", LENGTH + 1, "boundaries of the state do not ascend from 0 to 2000"),
    ("methods.oktopk.boundaries.0", LENGTH, "boundaries of the state do not ascend from 0 to 2000"),
    ("methods.other", {}, "the state is of unknown methods: other"),
    ("length", LENGTH + 1, "state has length 2001, this reducer 2000"),
    ("method", "dense", "state has method 'dense', this reducer 'oktopk': pass method='dense' to go on"),
    ("wire", "int4", "state has wire 'int4', this reducer 'plain': pass wire='int4' to go on"),
    ("exchange", "grid", "state has exchange 'grid', this reducer 'direct': pass exchange='grid' to go on"),
    ("last_k", "x", "last_k 'x' of the state is not an integer >= 0"),
    (
        "residual",
        np.zeros(1999, np.float32),
        r"residual of the state is float32\[1999\], not float32\[2000\]",
    ),
    (
        "residual",
        np.zeros(2001, np.float32),
        r"residual of the state is float32\[2001\], not float32\[2000\]",
    ),
    ("residual", np.zeros(2000), r"residual of the state is float64\[2000\], not float32\[2000\]"),
    ("residual.3", np.inf, "residual of the state is not finite"),
    ("steps", -1, "steps -1 of the state is not an integer >= 0"),
    # without a sentence of its own; Python's ValueError is of a list where a number was
    ("methods.oktopk", {}, "the state is damaged: KeyError 'selection'"),
    ("methods.oktopk.splits", [[1, 2], [3]], "the state is damaged: ValueError"),
]
OF_OTHERS: list[tuple[str, str, Any, str]] = [
    ("table", "width", 4, "of a table of"),
    ("table", "steps", -5, "-5 steps"),
    ("buckets", "buckets.3.steps", -1, "bucket 3: steps -1"),
    ("buckets", "buckets.3", LACKING, r"the state has buckets of \[700, 1, 1235\] elements"),
]


def damage(state: Any, where: str, value: Any) -> None:
    *path, last = where.split(".")
    for key in path:
        state = state[key]
    last = last if isinstance(state, dict) else int(last)  # type: ignore[assignment]
    if value is LACKING:
        del state[last]
    else:
        state[last] = value


@pytest.mark.parametrize(
    ("kind", "where", "value", "message"), [*(("oktopk", *each) for each in DAMAGE), *OF_OTHERS]
)
def test_a_state_that_misfits_one_rank_is_refused_on_all(
    comm: MPI.Intracomm, kind: str, where: str, value: Any, message: str
) -> None:
    reducer, last = made(comm, kind), comm.size - 1
    for number in range(4):
        step(reducer, comm, "cpu", number)
    before = reducer.state_dict()
    state = copy.deepcopy(before)
    if comm.rank == last:
        damage(state, where, value)
    with pytest.raises(ValueError, match=f"rank {last}: .*{message}"):
        reducer.load_state_dict(state)
    after = reducer.state_dict()
    parts = zip(before.get("buckets", {}).values(), after.get("buckets", {}).values(), strict=True)
    for was, now in [(before, after), *parts]:
        assert was.get("steps") == now.get("steps")
        assert np.array_equal(was.get("residual", 0), now.get("residual", 0))
    if kind == "oktopk":
        before["wire"] = "float32"  # the bits of plain
    reducer.load_state_dict(before)
    step(reducer, comm, "cpu", 4)


@pytest.mark.parametrize("kind", ["oktopk", "table"])
def test_what_is_no_state_is_refused_on_all_ranks(comm: MPI.Intracomm, kind: str) -> None:
    reducer = made(comm, kind)
    with pytest.raises(ValueError, match="the state is a NoneType|not that of a table"):
        reducer.load_state_dict(None if comm.rank == comm.size - 1 else reducer.state_dict())


@pytest.mark.mpi(min_size=2)
def test_states_of_different_steps_are_refused_on_all(comm: MPI.Intracomm) -> None:
    reducer = made(comm, "oktopk")
    step(reducer, comm, "cpu", 0)
    state = reducer.state_dict()
    step(reducer, comm, "cpu", 1)
    with pytest.raises(ValueError, match="ranks disagree on steps: rank 0: 1, rank 1: 2"):
        reducer.load_state_dict(reducer.state_dict() if comm.rank else state)
