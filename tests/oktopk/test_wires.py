"""Ok-Topk over coded entries: the contract with every wire, what is refused, what is kept, and what damaged bytes lead to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.codec import VALUE_BITS, CodedEntries
from collectives.cpu import kernels as host_kernels
from collectives.sparse import ENTRY
from collectives.sum_values import value_words
from collectives.traffic import step_limit
from collectives.workspace import Workspace
from oktopk import METHODS, GradientAllreduce
from oktopk.methods.union import union_words
from oktopk.settings import selection_cap
from tests.devices import get, put, use
from tests.inputs import GRADIENTS, entries_with, shapes_of
from tests.oracle import top_k

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=6), pytest.mark.host_cuda(ranks=3)]

ROUNDING = [name for name in VALUE_BITS if name != "float32"]
# every kind of gradient meets a wire that rounds, and every such wire all shapes
KINDS = [("oktopk", kind, ROUNDING[at % len(ROUNDING)]) for at, kind in enumerate(GRADIENTS)]
KINDS += [
    ("union", kind, wire) for kind, wire in zip(("clustered", "heavy tailed", "iid"), ROUNDING, strict=True)
]
EVERY = {"threshold_interval": 3, "boundary_interval": 2, "average": False}


def reducer(comm: MPI.Intracomm, device: str, length: int, wire: str, **settings: Any) -> GradientAllreduce:
    use(device, comm)
    chosen = {"density": 0.05, "peer_memory": False, "wire": wire} | EVERY | settings
    return GradientAllreduce(comm, length, device=device, **chosen)


def heavy_tailed(rng: np.random.Generator, length: int) -> NDArray[np.float32]:
    return rng.standard_t(3, length).astype(np.float32)


def agreed(comm: MPI.Intracomm, reduced: GradientAllreduce) -> NDArray[np.float32]:
    """The update, checked to be that of all ranks."""
    update = get(reduced.update)
    assert len(set(comm.allgather(update.tobytes()))) == 1
    return update


def check_mass(
    comm: MPI.Intracomm, put_in: NDArray[np.float32], left: NDArray[np.float32], update: Any
) -> None:
    """What ranks put in is what they keep and what was applied, to float32 rounding."""
    total = comm.allreduce(put_in.astype(np.float64))
    scale = comm.allreduce(np.abs(put_in.astype(np.float64))) + np.abs(update.astype(np.float64))
    difference = np.abs(total - comm.allreduce(left.astype(np.float64)) - update)
    assert (difference <= 2**-21 * scale + 1e-44 * comm.size).all()


@pytest.mark.parametrize(("method", "kind", "wire"), KINDS)
def test_nothing_is_lost_in_rounding_and_no_step_sends_more_than_plain(
    comm: MPI.Intracomm, method: str, kind: str, wire: str
) -> None:
    """On CPUs: a GPU gives their bits (test_executors.py), or the oracle's (below)."""
    for length, density in shapes_of(kind, 0, 2):
        reduced = reducer(comm, "cpu", length, wire, density=density, method=method)
        rng = np.random.default_rng((comm.rank, length))
        before = np.zeros(length, np.float32)
        for _ in range(4):
            gradient = GRADIENTS[kind](rng, length, comm.rank, comm.size)
            report = reduced.step(gradient)
            update, left = agreed(comm, reduced), get(reduced.residual)
            check_mass(comm, gradient + before, left, update)
            assert np.isfinite(left).all()
            words = comm.allreduce(report.bytes / 4) / comm.size
            if method == "oktopk":
                most_words, most = step_limit(report.k, comm.size), selection_cap(report.k)
            else:
                local = selection_cap(METHODS[method].local_k(report.k, comm.size))
                most = min(local * comm.size, length)
                most_words = union_words([local] * comm.size, length)[1]
                most_words += value_words(wire, most, comm.size) - value_words("plain", most, comm.size)
            assert words <= most_words + 1e-9
            applied = np.count_nonzero(update)
            assert applied <= report.global_nnz <= most
            assert (
                method == "union" or applied == report.global_nnz
            )  # a value of a union may be coded as zero
            assert report.wire == wire
            assert 0 <= report.rounded <= 0.5 or kind == "denormal"  # bfloat16 has fewer of these
            before = left
        reduced.close()


@pytest.mark.parametrize("method", ["oktopk", "union"])
def test_a_wire_without_rounding_gives_plain_bits_and_codes_every_index(
    comm: MPI.Intracomm, device: str, method: str
) -> None:
    settings: dict[str, Any] = {"balance_trigger": 1.0, "method": method}
    length = 20_000
    both = [reducer(comm, device, length, wire, **settings) for wire in ("plain", "float32")]
    rng = np.random.default_rng(comm.rank)
    for _ in range(5):
        gradient = heavy_tailed(rng, length)
        plain, coded = (reduced.step(put(device, gradient)) for reduced in both)
        assert agreed(comm, both[0]).tobytes() == agreed(comm, both[1]).tobytes()
        assert get(both[0].residual).tobytes() == get(both[1].residual).tobytes()
        assert plain.rounded == coded.rounded == 0.0
        assert coded.messages == plain.messages
        assert coded.control_words == plain.control_words
        assert coded.words == -(-coded.bytes // 4)
        # the indices of a union travel coded on every wire, and its values without
        assert (
            coded.bytes == plain.bytes
            if method == "union"
            else comm.size == 1 or coded.bytes < 0.7 * plain.bytes
        )


def decoded(wire: str, entries: NDArray[np.void], lower: int, upper: int) -> NDArray[np.void]:
    """What arrives of a list."""
    codec = CodedEntries(wire, host_kernels, Workspace(), 2)
    coded = codec.buffer("wire", entries, codec.wire_bytes(len(entries), lower, upper) // ENTRY.itemsize)
    codec.encode(entries.copy(), lower, upper, coded, 0)
    out = np.zeros(len(entries), ENTRY)
    codec.decode(coded, lower, upper, out, 0)
    return out


def oracle(
    accumulated: NDArray[np.float32], k: int, boundaries: NDArray[np.int64], wire: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The update, and float32[P, n] of residuals, of one exact step by the contract of wires that round."""
    ranks, length = accumulated.shape
    left, sums = accumulated.copy(), np.zeros(length, np.float32)
    selected = [top_k(row.astype(np.float64), k) for row in accumulated]
    for region, (lower, upper) in enumerate(pairwise(boundaries.tolist())):
        for source in ((region - i) % ranks for i in range(ranks)):
            sent = selected[source][(selected[source] >= lower) & (selected[source] < upper)]
            values = accumulated[source, sent]
            if source != region and len(sent):
                values = decoded(wire, entries_with(sent, values), lower, upper)["value"]
            sums[sent] += values
            left[source, sent] -= values
    applied = top_k(sums.astype(np.float64), k)
    update = np.zeros(length, np.float32)
    rejected = np.setdiff1d(np.arange(length), applied)
    left[:, rejected] = accumulated[:, rejected]
    for region, (lower, upper) in enumerate(pairwise(boundaries.tolist())):
        kept = applied[(applied >= lower) & (applied < upper)]
        if len(kept):
            update[kept] = decoded(wire, entries_with(kept, sums[kept]), lower, upper)["value"]
        left[region, kept] += sums[kept] - update[kept]
    return update, left


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wire", ROUNDING)
def test_exact_thresholds_give_the_oracles_bits(comm: MPI.Intracomm, device: str, wire: str) -> None:
    length = 6000
    reduced = reducer(comm, device, length, wire, threshold_interval=1)
    rng = np.random.default_rng((comm.rank, 3))
    left = np.zeros(length, np.float32)
    for _ in range(3):
        gradient = heavy_tailed(rng, length)
        report = reduced.step(put(device, gradient))
        boundaries = reduced._methods["oktopk"].boundaries
        assert boundaries is not None
        update, residuals = oracle(np.array(comm.allgather(gradient + left)), report.k, boundaries, wire)
        left = get(reduced.residual)
        same = np.array_equal(get(reduced.update), update), np.array_equal(left, residuals[comm.rank])
        assert comm.allgather(same) == [(True, True)] * comm.size
        most = {"bfloat16": 2**-8, "int8": 0.02, "int4": 0.15}[wire]
        assert comm.allgather(0 < report.rounded <= most) == [True] * comm.size


def test_auto_is_plain_on_one_host_and_float32_over_several(comm: MPI.Intracomm) -> None:
    reports = []
    for ranks_per_host in (0, 1):
        for method in METHODS:
            reduced = reducer(comm, "cpu", 500, "auto", method=method, ranks_per_host=ranks_per_host)
            report = reduced.step(np.ones(500, np.float32))
            reports.append((method, report.wire, reduced.settings.wire, report.rounded))
            reduced.close()
    expected = [(method, "plain", "plain", 0.0) for method in METHODS]
    coded = [
        (m, w, w, 0.0)
        for m in METHODS
        for w in ["float32" if METHODS[m].coded and comm.size > 1 else "plain"]
    ]
    assert reports == expected + coded


def test_peer_memory_is_for_plain_entries(comm: MPI.Intracomm, device: str) -> None:
    reduced = reducer(comm, device, 500, "float32", peer_memory=None)
    assert (
        reduced.p2p_unavailable_reason
        == "steps through peer memory read plain entries, and wire is 'float32'"
    )
    reduced = reducer(comm, device, 500, "plain", peer_memory=None, exchange="grid")
    assert reduced.p2p_unavailable_reason.endswith("exchange directly, and exchange is 'grid'")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("gathered", [False, True], ids=["sent", "gathered"])
@pytest.mark.parametrize("exact", [False, True], ids=["regular", "exact"])
@pytest.mark.parametrize("width", [False, True], ids=["bytes", "width"])
def test_damaged_entries_raise_on_all_ranks_and_name_the_rank(
    comm: MPI.Intracomm, device: str, width: bool, exact: bool, gathered: bool
) -> None:
    length = 4000
    reduced = reducer(comm, device, length, "int8", threshold_interval=1 if exact else 100)
    rng = np.random.default_rng((comm.rank, 6))
    for _ in range(2):
        reduced.step(put(device, heavy_tailed(rng, length)))
    before, codec = get(reduced.residual), reduced._methods["oktopk"].codec
    encode, decode, transport = codec.encode, codec.decode, cast("Any", reduced.transport)

    def truncate(entries: Any, lower: int, upper: int, wire: Any, dest: int) -> None:
        encode(entries, lower, upper, wire, dest)
        if comm.rank == 1 and gathered == (dest == comm.rank):
            last = wire[-2:]
            if device == "cpu":
                last[:] = 0
            else:
                transport.device.zero(last.pointer, last.nbytes)

    def narrow(wire: Any, lower: int, upper: int, out: Any, source: int, **how: bool) -> None:
        """What rank 1 gathered is shorter on all ranks, what it sent on rank 0 alone."""
        shorter = source == 1 and bool(how) == gathered and (gathered or comm.rank == 0)
        decode(wire[:-1] if shorter else wire, lower, upper, out, source, **how)

    found = "rank 1: "
    if width:
        codec.decode = narrow  # type: ignore[assignment, method-assign]
    else:
        codec.encode = truncate  # type: ignore[method-assign]
        found += "the bitmap holds another number of entries"
    raised = []
    for _ in range(2):  # a GPU finds what was gathered in the next step
        try:
            reduced.step(put(device, heavy_tailed(rng, length)))
        except ValueError as error:
            raised.append(found in str(error))
        else:
            with pytest.raises(RuntimeError, match="entries that the last step gathered are damaged"):
                reduced.state_dict()
        if device == "cpu" or not gathered:
            assert comm.allgather(raised) == [[True]] * comm.size
            assert np.allclose(get(reduced.residual), before, rtol=1e-4, atol=1e-5)
            break
    assert comm.allgather(raised) == [[True]] * comm.size
    codec.encode, codec.decode = encode, decode  # type: ignore[method-assign]
    assert not reduced.step(put(device, heavy_tailed(rng, length))).skipped
    assert np.isfinite(agreed(comm, reduced)).all()
