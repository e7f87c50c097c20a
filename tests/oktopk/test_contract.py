"""What must hold for every method, on any number of ranks and any input: the contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.dense_allreduce import dense_words
from collectives.traffic import step_limit, upper_bound
from oktopk import METHODS, GradientAllreduce, StepReport
from oktopk.settings import selection_cap
from tests import oracle
from tests.contract_executors import LibraryUpdates, ReferenceAllreduce, ReferenceUpdates
from tests.devices import DEVICES, get, gpus, put, use
from tests.inputs import GRADIENTS, SHAPES, Vector, shapes_of

STEPS = 5
REFERENCES = {
    "reference": ReferenceAllreduce,
    "reference of updates": ReferenceUpdates,
    "updates": LibraryUpdates,
}

pytestmark = pytest.mark.mpi


@dataclass(frozen=True)
class Observed:
    """One step as all ranks see it."""

    gradients: Vector
    before: Vector
    update: Vector
    after: Vector
    report: StepReport
    words: float


def reducer_on(device: str, comm: Any, length: int, method: str, **settings: Any) -> Any:
    """A reducer that gives the sum, on the host, on a GPU, or by one of REFERENCES."""
    if device in REFERENCES:
        return REFERENCES[device](comm, length, method, **settings)
    return GradientAllreduce(comm, length, method, device=device, average=False, **settings)


def run(
    comm: MPI.Intracomm,
    device: str,
    method: str,
    kind: str,
    length: int,
    density: float,
    steps: int = STEPS,
    over: Any = None,
    **settings: object,
) -> Iterator[Observed]:
    """Run a reducer that gives the sum, over `over` in place of the communicator, and gather what every rank put in and kept."""
    use(device, comm)
    reducer = reducer_on(device, over or comm, length, method, density=density, **settings)
    rng = np.random.default_rng((comm.rank, length))
    residual = np.zeros(length, np.float32)
    for _ in range(steps):
        gradient = GRADIENTS[kind](rng, length, comm.rank, comm.size)
        kept = gradient.copy()
        given = put(device, gradient)
        report = reducer.step(given)
        assert np.array_equal(get(given), kept), "the caller's gradient was changed"
        left = np.zeros(length, np.float32) if reducer.residual is None else get(reducer.residual)
        updates = comm.allgather(get(reducer.update).tobytes())
        assert len(set(updates)) == 1, "the ranks disagree on the update"
        yield Observed(
            gradients=np.array(comm.allgather(gradient)),
            before=np.array(comm.allgather(residual)),
            update=get(reducer.update),
            after=np.array(comm.allgather(left)),
            report=report,
            words=comm.allreduce(report.words) / comm.size,
        )
        residual = left
    reducer.close()


def check_caps(comm: MPI.Intracomm, method: str, length: int, step: Observed) -> None:
    """What was sent and applied in a step is within the bounds of its method."""
    if method == "dense":
        least = dense_words(length, comm.size)
        # through peer memory short vectors go to every rank at once
        most = max(least, length * (comm.size - 1)) if gpus() else least
        assert least - 1 <= step.words <= most + 1
        return
    k, ranks = step.report.k, comm.size
    assert step.report.local_nnz <= selection_cap(METHODS[method].local_k(k, ranks))
    selected = comm.allreduce(step.report.local_nnz)
    if method in ("topka", "gaussiank"):  # every rank's list goes to every other
        assert step.words == 2 * selected * (ranks - 1) / ranks
    elif method == "topkdsa":  # a region goes round as COO or dense, whichever is shorter
        assert step.words <= 2 * selected / ranks + (length + ranks) * (ranks - 1) / ranks
        assert step.words <= 2 * selected / ranks + 2 * step.report.global_nnz * (ranks - 1) / ranks + ranks
    elif method == "gtopk":  # every rank but one sends its list up once, and receives k entries once
        assert step.report.global_nnz <= max(k, selected if ranks == 1 else 0)
        assert step.words <= 2 * (selection_cap(k) + k) * (ranks - 1) / ranks
    elif method == "union":  # what was chosen goes round, then values there
        applied = step.report.global_nnz
        assert np.count_nonzero(step.update) <= applied <= selected
        assert step.words <= (2 * selected + 2 * applied) * (ranks - 1) / ranks + 2 * (ranks - 1)
    else:
        assert np.count_nonzero(step.update) == step.report.global_nnz <= selection_cap(k)
        assert step.words <= step_limit(k, ranks), (length, step.report)


def check_contract(
    comm: MPI.Intracomm,
    device: str,
    method: str,
    kind: str,
    shapes: Iterable[tuple[int, float]] = SHAPES,
    steps: int = STEPS,
) -> None:
    """Nothing is lost, no step passes the caps, and exact ones are the oracle's."""
    for length, density in shapes:
        exact = 0
        for step in run(
            comm, device, method, kind, length, density, steps, threshold_interval=2, boundary_interval=3
        ):
            gradients, before = step.gradients.astype(np.float64), step.before.astype(np.float64)
            came_out = step.after.astype(np.float64).sum(axis=0) + step.update
            assert np.array_equal((gradients + before).sum(axis=0), came_out), (length, density, step.report)
            check_caps(comm, method, length, step)
            if all(comm.allgather(step.report.exact)):
                exact += 1
                expected = oracle.ORACLES[method](gradients, before, step.report.k)
                assert np.array_equal(step.update, expected.update), (length, density)
                assert np.array_equal(step.after, expected.residuals), (length, density)
        assert exact >= (steps + 1) // 2  # every second step is planned to be


@pytest.mark.parametrize("kind", GRADIENTS)
def test_ok_topk_loses_nothing_keeps_its_caps_and_equals_the_oracle(
    comm: MPI.Intracomm, device: str, kind: str
) -> None:
    """On CPUs with two thirds of the shapes, as the library's updates have the others: the exchange is one."""
    of_updates = shapes_of(kind, 1, 3) if device == "cpu" else []
    check_contract(comm, device, "oktopk", kind, [shape for shape in SHAPES if shape not in of_updates])


@pytest.mark.parametrize("at", range(len(GRADIENTS)), ids=[*GRADIENTS].__getitem__)
@pytest.mark.parametrize("which", ["reference", "updates"])
def test_reference_and_updates_lose_nothing_pass_no_cap_and_equal_the_oracle(
    comm: MPI.Intracomm, which: str, at: int
) -> None:
    """`oktopk.reference` of gradients and of updates in turn, each with one shape in turn; updates with a third of them."""
    kind = [*GRADIENTS][at]
    shapes = shapes_of(kind, 1, 3) if which == "updates" else [SHAPES[at // 2 % len(SHAPES)]]
    if which == "reference" and at % 2:
        which = "reference of updates"
    check_contract(comm, which, "oktopk", kind, shapes, 4 if which == "updates" else 3)


def parts() -> list[Any]:
    """(method, kind, whether the rest) for all methods but Ok-Topk: of each kind one shape, and in `make test-all` the rest.

    In `make test` every method runs with every kind and with every shape, and every pair of a kind and a shape with one of them.
    """
    others = [method for method in METHODS if method != "oktopk"]
    assert len(others) == len(SHAPES)
    long = pytest.mark.long("`make test` has these shapes with other methods, and Ok-Topk with all")
    return [
        pytest.param(method, kind, rest, marks=[long] if rest else [], id=f"{method}-{kind}{'-rest' * rest}")
        for method in others
        for kind in GRADIENTS
        for rest in (False, True)
    ]


@pytest.mark.parametrize(("method", "kind", "rest"), parts())
def test_other_methods_lose_nothing_keep_their_caps_and_equal_their_oracles(
    comm: MPI.Intracomm, device: str, method: str, kind: str, rest: bool
) -> None:
    at = [name for name in METHODS if name != "oktopk"].index(method)
    one = shapes_of(kind, at, len(SHAPES))
    # without regions, which are renewed later, nothing is new after an exact step and a regular one
    check_contract(comm, device, method, kind, [shape for shape in SHAPES if (shape in one) != rest], 3)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_all_ranks_report_as_exact_has_the_oracles_update(
    comm: MPI.Intracomm, device: str, method: str
) -> None:
    length = 9001
    reducer = GradientAllreduce(
        comm, length, method, device=device, density=0.02, threshold_interval=10, average=False
    )
    rng = np.random.default_rng((comm.rank, 5))
    residuals = np.zeros((comm.size, length), np.float32)
    seen = set()
    for number in range(12):
        if number == 5 and method != "dense":  # the local threshold alone
            reducer._methods[method].selection.force_exact()  # type: ignore[attr-defined]
        gradient = rng.integers(-999, 1000, length).astype(np.float32)
        report = reducer.step(put(device, gradient))
        gradients = np.array(comm.allgather(gradient), np.float64)
        exact = all(comm.allgather(report.exact))
        assert len(set(comm.allgather(report.global_exact))) == 1
        if exact:
            expected = oracle.ORACLES[method](gradients, residuals.astype(np.float64), report.k)
            assert np.array_equal(get(reducer.update), expected.update), report.step
        seen.add((all(comm.allgather(report.local_exact)), report.global_exact, exact))
        if reducer.residual is not None:
            residuals = np.array(comm.allgather(get(reducer.residual)))
    reducer.close()
    if method == "dense":
        assert seen == {(True, False, True)}
    elif method == "oktopk":
        # one exact threshold of both is not enough
        assert {(True, True, True), (True, False, False), (False, False, False)} <= seen
    else:
        assert seen == {(True, False, True), (False, False, False)}


@pytest.mark.parametrize("device", [*DEVICES, "reference"], indirect=True)
def test_ok_topk_stays_under_its_bound_and_near_k_on_drifting_gradients(
    comm: MPI.Intracomm, device: str
) -> None:
    length, density = 40_000, 0.02
    reducer = reducer_on(device, comm, length, "oktopk", density=density)
    rng = np.random.default_rng(comm.rank)
    scale = np.repeat(10.0 ** np.random.default_rng(1).uniform(-2, 0, 40), length // 40)
    words, deviation = [], []
    for step in range(12 if device == "reference" else 64):
        drift = 1 + 0.2 * np.sin(step / 9)
        gradient = (rng.standard_t(4, length) * scale * drift).astype(np.float32)
        report = reducer.step(put(device, gradient))
        words.append(comm.allreduce(report.words) / comm.size)
        deviation.append(abs(report.global_nnz - report.k) / report.k)
    assert np.mean(words) <= upper_bound(report.k, comm.size)
    assert np.mean(deviation) <= 0.05


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (method, kind)
        for number, method in enumerate(name for name in METHODS if name != "dense")
        for at, kind in enumerate(("constant", "ties", "clustered"))
        if method == "oktopk" or number % 3 == at  # of one selection, whose rules test_selection.py has
    ],
)
def test_equal_entries_are_selected_up_to_k_and_none_is_lost(
    comm: MPI.Intracomm, device: str, method: str, kind: str
) -> None:
    for length, density in ((1, 0.25), (400, 0.25), (2000, 0.1)):
        local, applied = [], []
        for step in run(comm, device, method, kind, length, density, steps=12):
            k = step.report.k
            put_in = step.gradients.astype(np.float64) + step.before
            came_out = step.after.astype(np.float64).sum(axis=0) + step.update
            assert np.array_equal(put_in.sum(axis=0), came_out)
            nonzeros, wanted = np.count_nonzero(put_in[comm.rank]), METHODS[method].local_k(k, comm.size)
            local.append(abs(step.report.local_nnz - min(wanted, nonzeros)) / wanted)
            applied.append(step.report.global_nnz / k - 1)
        # of one entry a threshold that is reused may miss it; in a union other ranks' choices leave this one's residual, too
        of_union = 0.1 if comm.size <= 4 else 0.2  # 0.144 of clustered entries on eight ranks
        most = max(of_union if method == "union" else 0.05, 0.5 / wanted)
        assert np.mean(comm.allgather(local)) <= most, (length, local)
        if method in ("oktopk", "gtopk"):  # the others apply all that any rank selected
            assert np.mean(np.maximum(applied, 0)) <= most, (length, applied)


@pytest.mark.parametrize(
    "settings",
    [
        *({"balance_trigger": 1.0, "bucket_rounds": rounds} for rounds in (1, 8)),
        *({"bucket_rounds": 2}, {"rotate": False}, {"balanced_regions": False}),
        *({"exchange": "grid", "bucket_rounds": rounds} for rounds in (1, 8)),
        {"levels": "hosts", "ranks_per_host": 1, "wire": "plain"},
        {"levels": "hosts", "ranks_per_host": 1, "wire": "plain", "exchange": "grid"},
    ],
    ids=str,
)
@pytest.mark.host_cuda(ranks=4)
def test_balancing_buckets_rotation_regions_grids_and_hosts_of_one_rank_change_no_bit(
    comm: MPI.Intracomm, device: str, settings: dict[str, Any]
) -> None:
    plain = run(comm, device, "oktopk", "clustered", 3000, 0.05, boundary_interval=4)
    other = run(comm, device, "oktopk", "clustered", 3000, 0.05, boundary_interval=4, **settings)
    for one, two in zip(plain, other, strict=True):
        assert np.array_equal(one.update, two.update)
        assert np.array_equal(one.after, two.after)
        assert one.report.local_nnz == two.report.local_nnz
        assert one.report.global_threshold == two.report.global_threshold
        if device == "cpu" and "levels" in settings and "exchange" not in settings:
            assert one.report.bytes == two.report.bytes_between
