"""Ok-Topk over a grid of ranks: the contract on every number of them to 16, with ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.codec import CodedEntries
from collectives.errors import FlaggedRanksError
from collectives.grid import connect_grid, place_in_grid, rows_of_grid
from collectives.traffic import Traffic, step_limit
from oktopk.backend import Backend
from oktopk.cpu.histograms import LEVELS
from oktopk.error_feedback import ErrorFeedback
from oktopk.message_executor import MessageExecutor
from oktopk.methods.oktopk import OkTopk
from oktopk.results import StageTimer
from oktopk.settings import Settings, entries_kept, selection_cap
from oktopk.step import Plan
from tests import oracle
from tests.inputs import GRADIENTS, SHAPES, Vector, shapes_of
from tests.oktopk.test_wires import decoded, entries_with
from tests.threads import ThreadTransport, on_threads

FEW = (4, 5, 7, 9)
"""Two columns and more, equal ones and not."""
OTHERS = (1, 2, 3, 6, 8, *range(10, 17))
LONG = pytest.mark.long(
    "all numbers of ranks to 16 take half a minute; `make test` has the smallest grid of each kind"
)
RANKS = [*FEW, *(pytest.param(ranks, marks=LONG) for ranks in OTHERS)]
GRIDS = [*FEW, *(pytest.param(ranks, marks=LONG) for ranks in OTHERS if ranks >= 4)]
ROUNDING = ("bfloat16", "int8", "int4")


@dataclass
class Ended:
    """One step of one rank."""

    put_in: Vector
    update: Vector
    left: Vector
    nnz: tuple[int, int]
    exact: bool
    boundaries: NDArray[np.int64]
    traffic: Traffic
    rounding: tuple[float, float]


class Rank:
    """A rank's vectors, and what steps on them."""

    def __init__(self, transport: ThreadTransport, length: int, **settings: Any) -> None:
        chosen = Settings(**{"wire": "plain", "exchange": "grid"} | settings)
        transport.grid = connect_grid(transport)
        backend = Backend()
        self.transport, self.length, self.settings = transport, length, chosen
        self.method = OkTopk(length, transport, backend.kernels, chosen)
        self.vectors = ErrorFeedback(backend, length, chosen, True)
        self.executor = MessageExecutor(self.method, self.vectors)

    def step(self, gradient: Vector, exact: bool) -> Ended:
        k = entries_kept(self.settings.density, self.length)
        assert self.vectors.residual is not None
        put_in = self.vectors.residual.astype(np.float32) + gradient
        self.transport.take_traffic()
        result = self.executor.begin(gradient, Plan(k, exact, exact, 1.0, StageTimer())).result()
        nnz = result.local_nnz, result.global_nnz
        update, left = self.vectors.update.copy(), self.vectors.residual.copy()
        traffic, boundaries = self.transport.take_traffic(), self.method.boundaries.copy()
        whole = result.local_exact and result.global_exact
        return Ended(put_in, update, left, nnz, whole, boundaries, traffic, result.rounding)


def steps(
    ranks: int, length: int, draw: Callable[[int, int], Vector], exact: list[bool], **settings: Any
) -> Iterator[list[Ended]]:
    """Each step as all ranks see it. draw: (rank, step) -> gradient."""

    def run(transport: ThreadTransport) -> list[Ended]:
        rank = Rank(transport, length, **settings)
        return [rank.step(draw(transport.rank, at), each) for at, each in enumerate(exact)]

    for step in zip(*on_threads(ranks, run), strict=True):
        assert len({each.update.tobytes() for each in step}) == 1, "the ranks disagree on the update"
        yield [*step]


def drawn(kind: str, length: int, ranks: int) -> Callable[[int, int], Vector]:
    return lambda rank, at: GRADIENTS[kind](np.random.default_rng((rank, at, length)), length, rank, ranks)


def heavy_tailed(length: int) -> Callable[[int, int], Vector]:
    return lambda rank, at: np.random.default_rng((rank, at)).standard_t(3, length).astype(np.float32)


def test_every_part_has_one_rank_in_each_row_and_one_that_owns_it() -> None:
    for ranks in (*range(1, 90), 255, 256, 257, 299):
        places = [place_in_grid(rank, ranks) for rank in range(ranks)]
        rows = rows_of_grid(ranks)
        columns = ranks // rows
        assert rows == 1 or ranks >= 4
        assert rows <= columns
        assert rows + columns <= 4 * ranks**0.5 or rows == 1
        assert [place.first for place in places] == sorted(place.first for place in places)
        for rank, place in enumerate(places):
            assert place.first <= rank < place.stop
            assert place.stop - place.first in (rows, rows + 1)
            assert all(places[other].column == place.column for other in range(place.first, place.stop))
            assert rank in place.members
            assert all(places[other].members == place.members for other in place.members)
            assert len(place.members) in (columns, columns + 1)
            spans = [*pairwise(place.cuts.tolist())]
            for other, (begin, end) in zip(place.members, spans, strict=True):
                owns = (places[other].first, places[other].stop)
                assert (begin, end) == owns or (begin == end and other - places[other].first == rows)
            assert (place.cuts[0], place.cuts[-1]) == (0, ranks)


def others(ranks: int) -> int:
    """Bytes of control of an exact step but for the exchange, by the same step without a grid."""
    return sum(
        4 * -(-2 * count * 2 * (ranks - 1) // ranks)
        for count in (ranks - 1, *(1 << width for _, width in LEVELS))
    ) + 16 * (ranks - 1)


def check_whole_numbers(ranks: int, kind: str, length: int, density: float, **settings: Any) -> None:
    """Of whole numbers: nothing is lost, no step passes its caps, and exact ones are the oracle's."""
    limit, k = step_limit(entries_kept(density, length), ranks, "grid"), entries_kept(density, length)
    every = steps(ranks, length, drawn(kind, length, ranks), [True, False, True], density=density, **settings)
    before, exact = np.zeros((ranks, length)), 0
    for step in every:
        put_in, left = (
            np.array([getattr(each, name) for each in step], np.float64) for name in ("put_in", "left")
        )
        assert np.array_equal(put_in.sum(axis=0), left.sum(axis=0) + step[0].update), (length, density)
        assert np.count_nonzero(step[0].update) == step[0].nnz[1] <= selection_cap(k)
        assert max(each.nnz[0] for each in step) <= selection_cap(k)
        assert ranks < 4 or np.mean([each.traffic.bytes for each in step]) <= 4 * limit + 1e-6
        if all(each.exact for each in step):
            exact += 1
            expected = oracle.ok_topk(put_in - before, before, k)
            assert np.array_equal(step[0].update, expected.update), (length, density)
            assert np.array_equal(left, expected.residuals), (length, density)
        before = left
    assert exact >= 2


@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_lost_and_exact_steps_are_the_oracles(ranks: int) -> None:
    """Every kind of gradient on a third of the shapes: vectors shorter than the ranks, silent ranks, nothing selected."""
    for at, kind in enumerate(GRADIENTS):
        wire = ("plain", "float32")[at % 2]
        for length, density in shapes_of(kind, ranks % 3, 3):
            check_whole_numbers(ranks, kind, length, density, wire=wire)


@pytest.mark.parametrize(
    "settings", [{"bucket_rounds": 1}, {"rotate": False}, {"balance_trigger": 1.0}], ids=str
)
def test_so_they_are_whatever_the_rounds(settings: dict[str, Any]) -> None:
    for ranks in (6, 7):
        for kind in ("clustered", "one region"):
            check_whole_numbers(ranks, kind, *SHAPES[4], **settings)


def split(values: Vector, at: NDArray[np.int64], lower: int, upper: int, wire: str) -> tuple[Vector, Vector]:
    """What arrives of a list that is sent, and its rounding errors, both float32[n]."""
    arrived, errors = np.zeros_like(values), np.zeros_like(values)
    chosen = at[(at >= lower) & (at < upper)]
    if len(chosen):
        arrived[chosen] = decoded(wire, entries_with(chosen, values[chosen]), lower, upper)["value"]
        errors[chosen] = values[chosen] - arrived[chosen]
    return arrived, errors


def grid_oracle(put_in: Vector, k: int, boundaries: NDArray[np.int64], wire: str) -> tuple[Vector, Vector]:
    """The update, and float32[P, n] of residuals, of one exact step over a grid by a wire that rounds."""
    ranks, length = put_in.shape
    places = [place_in_grid(rank, ranks) for rank in range(ranks)]
    selected = [oracle.top_k(row.astype(np.float64), k) for row in put_in]
    sent, passed = np.zeros((2, ranks, length), np.float32)  # rounding errors of both stages
    partial, sums = np.zeros((ranks, length), np.float32), np.zeros(length, np.float32)

    def add(
        rank: int, members: Any, parts: list[tuple[int, int]], values: Any, indices: Any, to: Any, errors: Any
    ) -> None:
        """Sum in rotation order what the members have of a rank's part, the own part as it is."""
        lower, upper = (int(boundaries[end]) for end in parts[members.index(rank)])
        place = members.index(rank)
        for source in (members[(place - i) % len(members)] for i in range(len(members))):
            chosen = indices[source][(indices[source] >= lower) & (indices[source] < upper)]
            arrived = values[source]
            if source != rank:
                arrived, lost = split(values[source], indices[source], lower, upper, wire)
                errors[source] += lost
            to[chosen] += arrived[chosen]

    for rank, place in enumerate(places):
        add(rank, place.members, [*pairwise(place.cuts.tolist())], put_in, selected, partial[rank], sent)
    middle = [np.flatnonzero(row) for row in partial]
    for rank, place in enumerate(places):
        column = range(place.first, place.stop)
        parts = [(owner, owner + 1) for owner in column]
        add(rank, column, parts, partial, middle, sums, passed)
    applied = oracle.top_k(sums.astype(np.float64), k)
    update, left = np.zeros(length, np.float32), put_in.copy()
    for region, (lower, upper) in enumerate(pairwise(boundaries.tolist())):
        arrived, _ = split(sums, applied, lower, upper, wire)
        update += arrived
        kept = applied[(applied >= lower) & (applied < upper)]
        for rank in range(ranks):
            mine = np.intersect1d(selected[rank], kept)
            left[rank, mine] = sent[rank, mine]
        left[region, kept] += sums[kept] - arrived[kept]
    # the sums that a rank passed on are added last, as its list of them comes last
    for rank in range(ranks):
        left[rank, applied] += passed[rank, applied]
    return update, left


@pytest.mark.parametrize("ranks", GRIDS)
def test_what_is_rounded_stays_with_the_rank_that_rounded_it(ranks: int) -> None:
    """An exact step has the oracle's bits; what ranks put in is what they keep and what is applied, to float32 rounding."""
    length, wire = 3000, ROUNDING[ranks % 3]
    every = steps(ranks, length, heavy_tailed(length), [True, True, False], density=0.05, wire=wire)
    for step in every:
        put_in, left = np.array([each.put_in for each in step]), np.array([each.left for each in step])
        update, total = step[0].update, put_in.astype(np.float64).sum(axis=0)
        lost = np.abs(total - left.astype(np.float64).sum(axis=0) - update)
        assert (lost <= 2**-21 * (np.abs(put_in).astype(np.float64).sum(axis=0) + np.abs(update))).all()
        assert all(0 < each.rounding[0] < 0.2 * each.rounding[1] for each in step)
        if all(each.exact for each in step):
            expected, residuals = grid_oracle(put_in, entries_kept(0.05, length), step[0].boundaries, wire)
            assert np.array_equal(update, expected)
            assert np.array_equal(left, residuals)


@pytest.mark.parametrize("ranks", GRIDS)
def test_a_rank_sends_to_its_row_and_its_column_alone(ranks: int) -> None:
    """Messages and words of the exchange, counted; balancing is left out, and where regions balance the words are as stated."""
    length, density = 12_000, 0.1
    k = entries_kept(density, length)
    settings = {"density": density, "balance_trigger": float(ranks)}
    *_, step = steps(ranks, length, heavy_tailed(length), [True] * 3, **settings)
    rows = rows_of_grid(ranks)
    columns = ranks // rows
    rounds = (ranks - 1).bit_length()
    gathered = [2 * step[0].nnz[1] * (ranks - 1) / ranks]
    for rank, each in enumerate(step):
        place = place_in_grid(rank, ranks)
        last = rank - place.first == rows  # it has no row
        along = columns if last else columns - 1
        down = 0 if last else place.stop - place.first - 1
        sent = along + down + rounds
        assert sent <= each.traffic.messages <= sent + (0 if ranks & (ranks - 1) == 0 else rounds)
        # boundaries; flags, counts of the row and of the column; three histograms and the counts of an exact step
        assert each.traffic.control_messages == 1 + 3 + 4
        counts = 8 * (ranks - 1) + 16 * (len(place.members) - 1 + place.stop - place.first - 1)
        assert each.traffic.control_bytes == counts + others(ranks)
    words = np.mean([each.traffic.bytes for each in step]) / 4 - np.mean(gathered)
    bound = 2 * k * (ranks - rows + ranks - columns) / ranks
    assert 0.7 * bound <= words <= 1.05 * bound


@pytest.mark.parametrize("ranks", [4, 5, 7, 9])
@pytest.mark.parametrize("wire", ["plain", "int8"])
def test_a_flag_stops_all_ranks_before_any_payload(ranks: int, wire: str) -> None:
    length = 500
    draw = heavy_tailed(length)

    def run(transport: ThreadTransport) -> list[int]:
        rank = Rank(transport, length, density=0.1, wire=wire)
        rank.step(draw(transport.rank, 0), True)
        before, named = rank.vectors.residual.copy(), []
        for bad in range(ranks):
            gradient = draw(transport.rank, 1)
            if transport.rank == bad:
                gradient[3] = np.nan
            with pytest.raises(FlaggedRanksError) as caught:
                rank.step(gradient, True)
            named += caught.value.ranks
            assert transport.take_traffic().bytes == 0
            assert np.allclose(rank.vectors.residual, before, rtol=0, atol=1e-5)
            assert not rank.vectors.update.any()
        rank.step(draw(transport.rank, 2), False)
        return named

    assert on_threads(ranks, run) == [[*range(ranks)]] * ranks


@pytest.mark.parametrize("wire", ["plain", "float32", "int4"])
@pytest.mark.parametrize("ranks", [4, 7])
def test_a_sum_that_overflows_on_the_way_is_raised_on_all_ranks(ranks: int, wire: str) -> None:
    """Ranks of one row overflow, which the others make up for: a direct exchange, too, would raise with another order."""
    length, row = 300, place_in_grid(0, ranks).members
    draw = heavy_tailed(length)

    def run(transport: ThreadTransport) -> list[list[int]]:
        rank, named = Rank(transport, length, density=0.1, wire=wire), []
        rank.step(draw(transport.rank, 0), True)
        before = rank.vectors.residual.copy()
        for exact in (True, False):
            gradient = draw(transport.rank, 1)
            gradient[7] = 3e38 if transport.rank in row else -3e38
            with pytest.raises(FlaggedRanksError) as caught:
                rank.step(gradient, exact)
            named.append(caught.value.ranks)
            others = np.arange(length) != 7
            assert np.isfinite(rank.vectors.residual).all()
            assert np.allclose(rank.vectors.residual[others], before[others], rtol=0, atol=1e-5)
        rank.step(draw(transport.rank, 2), True)
        return named

    assert on_threads(ranks, run) == [[[], []]] * ranks


class Damaging(CodedEntries):
    """What one rank sends in one of the stages does not decode."""

    stage = "row"

    def encode(self, entries: Any, lower: int, upper: int, wire: Any, dest: int) -> None:
        super().encode(entries, lower, upper, wire, dest)
        if not self._whole and isinstance(self._places, tuple) == (self.stage == "row"):
            wire[-2:] = 0


@pytest.mark.parametrize("stage", ["row", "column"])
@pytest.mark.parametrize("exact", [False, True])
def test_damaged_entries_of_either_stage_raise_on_all_ranks_and_name_the_rank(
    stage: str, exact: bool
) -> None:
    length, ranks, bad = 2000, 5, 1
    draw = heavy_tailed(length)

    def run(transport: ThreadTransport) -> str:
        rank = Rank(transport, length, density=0.1, wire="int8")
        rank.step(draw(transport.rank, 0), True)
        before, codec = rank.vectors.residual.copy(), rank.method.codec
        if transport.rank == bad:
            rank.method.codec = Damaging("int8", transport.kernels, transport.workspace, ranks)
            rank.method.codec.stage = stage
        with pytest.raises(ValueError, match="entries are damaged") as caught:
            rank.step(draw(transport.rank, 1), exact)
        assert np.allclose(rank.vectors.residual, before, rtol=1e-4, atol=1e-5)
        rank.method.codec = codec
        rank.step(draw(transport.rank, 2), exact)
        return str(caught.value)

    said = set(on_threads(ranks, run))
    assert len(said) == 1
    assert f"came from rank {bad}: the bitmap holds another number of entries" in said.pop()
