"""Dense allreduce over symmetric memory: bits that depend on the inputs alone, replays, and ranks that are missing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import MissingRanksError
from tests.devices import asynchronous, get, need_gpus, on_gpus, put, staged_transport, use
from tests.rows import narrowed, widened

pytestmark = [on_gpus, pytest.mark.mpi(max_size=8), pytest.mark.host_cuda(ranks=3)]
TYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
LENGTHS = (1, 2, 7, 8, 9, 1000, 4097, 70_001 if asynchronous() else 20_001)
"""The last one takes several tiles, a block each; blocks send several tiles in `short_rings`."""


@pytest.fixture
def dense(comm: MPI.Intracomm) -> Iterator[Any]:
    """A DenseP2P of the ranks, which are told apart by GPUs or share one."""
    made = make(comm)
    yield made
    made.close()


@pytest.fixture
def short_rings(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A DenseP2P whose launches through rings have two blocks at most: each sends much, and its rings go round in a launch."""
    use("cuda", comm)
    from collectives.cuda import dense_algorithms

    for name in ("tile_blocks", "line_blocks"):
        monkeypatch.setattr(dense_algorithms, name, lambda ranks: 2)
    dense_algorithms.dense_kernels.cache_clear()
    made = make(comm)
    yield made
    made.close()
    dense_algorithms.dense_kernels.cache_clear()


def make(comm: MPI.Intracomm, **arguments: Any) -> Any:
    transport = staged_transport(comm)
    from collectives.cuda.dense_p2p import DenseP2P

    return DenseP2P(transport, transport.device, **arguments)


def algorithms(dense: Any, nbytes: int) -> list[str]:
    from collectives.cuda.dense_algorithms import ALGORITHMS

    return [name for name in ALGORITHMS if dense.can_run(name, nbytes)]


def tree_sum(vectors: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Neighbours first, in float32: what every algorithm must give, bit for bit."""
    while len(vectors) > 1:
        core = 1 << (len(vectors).bit_length() - 1)
        pairs = len(vectors) - core or core // 2
        added = [a + b for a, b in zip(vectors[: 2 * pairs : 2], vectors[1 : 2 * pairs : 2], strict=True)]
        vectors = added + vectors[2 * pairs :]
    return vectors[0]


def expected(
    vectors: list[NDArray[Any]], element_type: str, scale: float = 1.0, addend: NDArray[Any] | None = None
) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        total = tree_sum([widened(each, element_type) for each in vectors]) * np.float32(scale)
        rounded: NDArray[Any] = narrowed(total, element_type)
        if addend is None:
            return rounded
        more = widened(rounded, element_type) + widened(addend, element_type)
        return narrowed(more, element_type)  # type: ignore[no-any-return]


def vector_of(rank: int, length: int, element_type: str, seed: int = 0) -> NDArray[Any]:
    """Heavy-tailed, with zeros of both signs, denormals, and the words that flags are."""
    rng = np.random.default_rng((seed, rank, length))
    values = (rng.standard_normal(length) ** 3).astype(np.float32)
    values[::7] = -0.0
    values[3::11] = np.float32(1e-41) * (rank + 1)
    vector: NDArray[Any] = narrowed(values, element_type)
    if element_type == "float32":
        vector.view(np.uint32)[5::13] = 1 + np.arange(len(vector[5::13]), dtype=np.uint32) % 40
    return vector


def enqueue(dense: Any, array: Any, out: Any = None, **options: Any) -> None:
    """Put the sum of an array on the stream, in place or into `out`."""
    (kind,) = (name for name, dtype in TYPES.items() if dtype == array.dtype)
    target = array if out is None else out
    dense.enqueue(array.data.ptr, target.data.ptr, 0, array.size, kind, **options)


def summed(dense: Any, array: Any, out: Any = None, **options: Any) -> NDArray[Any]:
    """The sum of an array once it is there, in place or in `out`."""
    enqueue(dense, array, out, **options)
    dense.check()
    return get(array if out is None else out)


def misaligned(array: NDArray[Any], elements: int) -> Any:
    """On the GPU, that many elements behind a multiple of 16 bytes."""
    import cupy

    whole = cupy.empty(len(array) + elements, array.dtype)
    whole[elements:] = put("cuda", array)
    return whole[elements:]


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.host_cuda(ranks=1)
def test_sums_are_those_of_the_tree_and_nothing_beside_them_is_written(
    comm: MPI.Intracomm, dense: Any, element_type: str
) -> None:
    """Whatever the length and the algorithm."""
    for length in LENGTHS:
        vectors = [vector_of(rank, length, element_type) for rank in range(comm.size)]
        want = expected(vectors, element_type)
        for algorithm in algorithms(dense, vectors[0].nbytes):
            array = put("cuda", vectors[comm.rank])
            guarded = put("cuda", np.full(length + 64, 77, array.dtype))
            got = summed(dense, array, guarded[32:-32], algorithm=algorithm)
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), f"{algorithm} {length}")
            assert get(array).tobytes() == vectors[comm.rank].tobytes()
            assert (np.delete(get(guarded), np.s_[32 : 32 + length]) == 77).all(), (algorithm, length)


@pytest.mark.parametrize("element_type", TYPES)
def test_neither_alignment_nor_place_nor_neighbours_change_a_bit(
    comm: MPI.Intracomm, dense: Any, element_type: str
) -> None:
    length = 5003
    vectors = [vector_of(rank, length, element_type, 1) for rank in range(comm.size)]
    want = expected(vectors, element_type)
    for elements in (0, 1, 3):
        # the ranks need not be aligned alike
        array = misaligned(vectors[comm.rank], elements if comm.rank % 2 else 0)
        for algorithm in algorithms(dense, vectors[0].nbytes):
            kept = array.copy()
            out = misaligned(np.zeros_like(vectors[0]), elements)
            enqueue(dense, kept, algorithm=algorithm)
            got = summed(dense, array, out, algorithm=algorithm)
            assert get(kept).tobytes() == got.tobytes() == want.tobytes()
    part = [vector[1000:1777] for vector in vectors]  # as a vector of its own
    out = put("cuda", part[comm.rank].copy())
    enqueue(dense, out)
    dense.check()
    assert get(out).tobytes() == want[1000:1777].tobytes()


@pytest.mark.parametrize("element_type", TYPES)
def test_a_scale_and_an_addend_are_rounded_the_same_in_every_algorithm(
    comm: MPI.Intracomm, dense: Any, element_type: str
) -> None:
    length = 3001
    vectors = [vector_of(rank, length, element_type, 2) for rank in range(comm.size)]
    addend = vector_of(9 + comm.rank, length, element_type, 3)
    want = expected(vectors, element_type, 1 / comm.size, addend)
    for algorithm in algorithms(dense, vectors[0].nbytes):
        array, more = put("cuda", vectors[comm.rank]), put("cuda", addend)
        pointer = array.data.ptr
        dense.enqueue(
            pointer, pointer, more.data.ptr, length, element_type, scale=1 / comm.size, algorithm=algorithm
        )
        dense.check()
        assert get(array).tobytes() == want.tobytes(), algorithm


def test_what_is_not_finite_is_counted_alike_on_all_ranks_and_stays(comm: MPI.Intracomm, dense: Any) -> None:
    vector = np.ones(2500, np.float32)
    largest = np.float32(3e38)
    if comm.rank == comm.size - 1:
        vector[[3, 1700]] = np.nan, np.inf
    vector[9] = largest  # whose sum overflows on two ranks or more
    bad = 2 + (comm.size > 1)
    for algorithm in algorithms(dense, vector.nbytes):
        count = put("cuda", np.zeros(1, np.uint32))
        total = summed(dense, put("cuda", vector), algorithm=algorithm, nonfinite=count.data.ptr)
        assert get(count)[0] == bad
        assert np.isnan(total[3])
        assert total[1700] == np.inf
        assert np.isinf(total[9]) == (comm.size > 1)
        assert (np.delete(total, [3, 9, 1700]) == comm.size).all()


@pytest.mark.parametrize(
    ("name", "lengths", "calls"),
    [("dense", (1, 300, 2048, 9000, 40_000), 40), ("short_rings", (1, 8193, 20_000, 70_001, 165_000), 16)],
)
def test_calls_of_many_lengths_never_read_what_another_call_sent(
    comm: MPI.Intracomm, request: pytest.FixtureRequest, name: str, lengths: tuple[int, ...], calls: int
) -> None:
    """Four are queued at a time, data and algorithms differ, and ranks are apart by turns.

    Of short rings numbers of tiles a block are 0 to 10 or more, odd and even, that of one block and of two apart by one.
    """
    made = request.getfixturevalue(name)
    rng = np.random.default_rng(6)  # the same on all ranks
    for first in range(0, calls, 4):
        queued = []
        for call in range(first, first + 4):
            length = int(rng.choice(lengths))
            choices = [each for each in algorithms(made, 4 * length) if name == "dense" or each != "one_shot"]
            algorithm = choices[rng.integers(len(choices))]
            vectors = [vector_of(rank, length, "float32", call) for rank in range(comm.size)]
            queued.append((put("cuda", vectors[comm.rank]), expected(vectors, "float32"), algorithm))
        if first // 4 % comm.size == comm.rank:
            time.sleep(0.002)
        for array, _, algorithm in queued:
            enqueue(made, array, algorithm=algorithm)
        made.check()
        for array, want, algorithm in queued:
            assert get(array).tobytes() == want.tobytes(), (first, algorithm, array.size)


def test_a_captured_call_is_replayed_with_new_contents(comm: MPI.Intracomm, dense: Any) -> None:
    import cupy

    length = 6000
    for algorithm in algorithms(dense, 4 * length):
        array, out = put("cuda", np.zeros(length, np.float32)), put("cuda", np.zeros(length, np.float32))
        stream = cupy.cuda.Stream(non_blocking=True)
        dense.check()
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            enqueue(dense, array, out, stream=stream.ptr, algorithm=algorithm)
            graph = stream.end_capture()
        for replay in range(5):
            vectors = [vector_of(rank, length, "float32", replay) for rank in range(comm.size)]
            array.set(vectors[comm.rank], stream=stream)
            graph.launch(stream)
            stream.synchronize()
            assert get(out).tobytes() == expected(vectors, "float32").tobytes()
            if replay == 2:  # a call between replays takes an epoch of its own
                other = put("cuda", vectors[comm.rank])
                enqueue(dense, other)
                dense.check()
                assert get(other).tobytes() == expected(vectors, "float32").tobytes()


def test_ten_thousand_replays_never_give_the_sum_of_another_call(comm: MPI.Intracomm, dense: Any) -> None:
    """A graph of three calls, each with a vector of its own: slots and parities come again after two, vectors after three."""
    import cupy

    from tests import host_cuda

    need_gpus(comm.size)  # else each replay waits for time slices
    replays = 7 if host_cuda.installed() else 10_000
    length = 3000
    vectors = [[vector_of(rank, length, "float32", seed) for rank in range(comm.size)] for seed in (5, 6, 7)]
    want = put("cuda", np.concatenate([expected(each, "float32") for each in vectors]))
    mine = put("cuda", np.concatenate([each[comm.rank] for each in vectors]))
    for algorithm in algorithms(dense, 4 * length):
        out = put("cuda", np.zeros(3 * length, np.float32))
        summed(dense, mine[:length], out, algorithm=algorithm)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            wrong = cupy.zeros(1, np.int64)
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            for at in range(0, 3 * length, length):
                enqueue(dense, mine[at : at + length], out[at:], stream=stream.ptr, algorithm=algorithm)
            graph = stream.end_capture()
            for replay in range(replays):
                out[...] = 0
                if replay % 50 == comm.rank:
                    time.sleep(0.002)
                graph.launch(stream)
                wrong += cupy.count_nonzero(out.view(np.uint32) != want.view(np.uint32))
        stream.synchronize()
        dense.check()
        assert int(get(wrong)[0]) == 0, algorithm


@pytest.mark.mpi(min_size=2, max_size=8)
def test_flags_of_one_shot_that_come_again_meet_no_old_ones(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags have 32 bits: launch 2^32 has that of words which were never written, where no launch overwrote them."""
    use("cuda", comm)
    from collectives.cuda import dense_algorithms

    longest = 128  # elements, in 64 units
    monkeypatch.setattr(dense_algorithms, "_FLAGGED", 4 * longest * comm.size)
    dense = make(comm)

    def check(length: int, seed: int) -> None:
        vectors = [vector_of(rank, length, "float32", seed) for rank in range(comm.size)]
        got = summed(dense, put("cuda", vectors[comm.rank]), algorithm="one_shot")
        assert got.tobytes() == expected(vectors, "float32").tobytes(), seed

    for launch in range(1, 9):
        check(1, launch)
    dense._counts[0].set(np.full(dense._counts[0].size, 2**32 - 1, np.uint64))  # odd, as 9
    check(1, 9)
    comm.Barrier()
    if comm.rank == 1:
        time.sleep(0.3)  # the others look for its words before it writes them
    for launch in range(10, 14):
        check(longest, launch)
    dense.close()


def test_traffic_is_counted(comm: MPI.Intracomm, dense: Any) -> None:
    length, others = 4096, comm.size - 1
    array = put("cuda", np.ones(length, np.float32))
    times = {"one_shot": others, "lines": others}
    flags_of = {"one_shot": 1.0, "lines": 1 / 15, "two_shot_lines": 1 / 15}  # of the data
    for algorithm in algorithms(dense, 4 * length):
        traffic = dense.transport.traffic
        before, flags = traffic.bytes, traffic.control_bytes
        summed(dense, array, algorithm=algorithm)
        sent = int(4 * length * times.get(algorithm, 2 * others / comm.size))
        assert traffic.bytes - before == sent
        assert traffic.control_bytes - flags == int(sent * flags_of.get(algorithm, 0))


@pytest.mark.parametrize(
    ("ranks", "lines", "longest"),
    [
        (2, True, {"one_shot": 256 << 10, "lines": 1 << 30}),
        (4, True, {"one_shot": 128 << 10, "lines": 256 << 10, "two_shot_lines": 1 << 30}),
        (2, False, {"one_shot": 1 << 20, "two_shot": 1 << 30}),
        (1, False, {"one_shot": 2 << 20, "two_shot": 1 << 30}),
    ],
)
def test_each_length_takes_the_algorithm_that_was_fastest(
    ranks: int, lines: bool, longest: dict[str, int]
) -> None:
    from collectives.cuda.dense_algorithms import algorithm_for

    lengths = [4096 << i for i in range(19)]
    taken = {algorithm_for(nbytes, ranks, lines): nbytes for nbytes in lengths}
    assert taken == longest
    assert list(taken) == [algorithm_for(nbytes, ranks, lines) for nbytes in longest.values()]


@pytest.mark.mpi(min_size=2, max_size=8)
@pytest.mark.parametrize(
    ("mine", "others", "sentence"),
    [
        ({"length": 64}, {"length": 65}, "rank 0 sums 64 elements of float32 by one_shot, rank 1 sums 65"),
        (
            {"length": 9000, "algorithm": "two_shot"},
            {"length": 9001, "algorithm": "two_shot"},
            "rank 1 sums 9001",
        ),
        ({"length": 1000, "algorithm": "lines"}, {"length": 9000, "algorithm": "lines"}, "9000 elements"),
        ({"length": 64, "algorithm": "one_shot"}, {"length": 64, "algorithm": "two_shot"}, "by two_shot"),
        (
            {"length": 64, "element_type": "float16"},
            {"length": 64, "element_type": "bfloat16"},
            "of bfloat16",
        ),
        (
            {"length": 64, "scale": 0.5},
            {"length": 64, "scale": 0.25},
            "rank 0 sums 64 elements of float32 by one_shot times 0.5, rank 1 sums .* by one_shot times 0.25",
        ),
        ({"length": 0}, {"length": 64}, "rank 0 sums 0 elements"),
    ],
)
def test_calls_that_differ_are_an_error_on_every_rank(
    comm: MPI.Intracomm, mine: dict[str, Any], others: dict[str, Any], sentence: str
) -> None:
    dense = make(comm)
    given = {"element_type": "float32"} | (mine if comm.rank == 0 else others)
    needed = {str(each.get("algorithm", "one_shot")) for each in (mine, others)}
    if not all(dense.can_run(name, 0) for name in needed):
        dense.close()
        pytest.skip("the GPUs are not joined by NVLink")
    array = put("cuda", np.ones(70_000, np.float32))
    pointer = array.data.ptr
    comm.Barrier()
    begun = time.monotonic()
    with pytest.raises(
        RuntimeError, match="ranks disagree on a dense allreduce over peer memory: .*" + sentence
    ):
        dense.enqueue(pointer, pointer, 0, **given)
        dense.check()
    with pytest.raises(RuntimeError, match="ranks disagree"):
        dense.enqueue(pointer, pointer, 0, 64, "float32")
    assert time.monotonic() - begun < 60  # not the time limit
    comm.Barrier()
    dense.close()


def test_an_error_gives_no_old_call_of_a_rank(comm: MPI.Intracomm) -> None:
    from collectives.cuda.dense_calls import last_calls

    def call(number: int, length: int, scale: float) -> list[int]:
        flag, low = number << 39, int(np.float32(scale).view(np.uint32))
        words = np.array([flag | length, flag | 2 << 32 | low], np.uint64)
        return words.view(np.uint32).tolist()  # type: ignore[no-any-return]

    before = [call(7, 5, 1.0)] * 3
    words = np.array([[call(8, 10, 0.5), call(8, 10, 0.50098), call(6, 99, 2.0)], before]).ravel().tolist()
    assert last_calls(words, 0) == (
        "rank 0 sums 10 elements of bfloat16 by one_shot times 0.5, "
        "rank 1 sums 10 elements of bfloat16 by one_shot times 0.50098002, rank 2 has not called"
    )


def test_lines_are_left_to_gpus_that_are_all_joined(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("cuda", comm)
    from collectives.cuda import dense_algorithms

    monkeypatch.setattr(dense_algorithms, "has_native_atomics", lambda gpu, other: comm.rank != 0)
    dense = make(comm)
    assert dense.can_run("lines", 4) == (comm.size == 1)
    vectors = [vector_of(rank, 50_000, "float32") for rank in range(comm.size)]
    array = put("cuda", vectors[comm.rank])
    assert "lines" not in dense.algorithm_for(array.nbytes) or comm.size == 1
    enqueue(dense, array)
    dense.check()
    assert get(array).tobytes() == expected(vectors, "float32").tobytes()
    if comm.size > 1:
        with pytest.raises(ValueError, match="lines takes no vector of 200000 bytes here"):
            enqueue(dense, array, algorithm="lines")
    dense.close()


@pytest.mark.mpi(min_size=2, max_size=8)
@pytest.mark.parametrize(
    "algorithm",
    [
        "one_shot",
        *(
            pytest.param(name, marks=pytest.mark.long("`make test` has the algorithm of one shot"))
            for name in ("lines", "two_shot")
        ),
    ],
)
def test_a_rank_that_does_not_come_ends_the_others_within_the_limit(
    comm: MPI.Intracomm, algorithm: str
) -> None:
    import cupy

    dense = make(comm, timeout=3.0)
    if not dense.can_run(algorithm, 20_000):
        dense.close()
        pytest.skip("the GPUs are not joined by NVLink")
    array = put("cuda", np.ones(5000, np.float32))
    comm.Barrier()
    begun = time.monotonic()
    if comm.rank != 1:
        with pytest.raises(MissingRanksError, match="rank.* 1 did not come within 3 s") as raised:
            summed(dense, array, algorithm=algorithm)
        assert raised.value.ranks == [1]
        assert 2.9 <= time.monotonic() - begun < 60
        with pytest.raises(RuntimeError, match="aborted"):
            enqueue(dense, array)
    comm.Barrier()
    if comm.rank == 1:  # too late: with two ranks the other one has sent all of its part
        enqueue(dense, array, algorithm=algorithm)
        cupy.cuda.get_current_stream().synchronize()
        with pytest.raises(MissingRanksError, match=r"rank.* 1 did not come"):
            dense.raise_if_aborted()  # what the kernel itself has found, without a look of the host
    comm.Barrier()
    dense.close()


@pytest.mark.mpi(min_size=2, max_size=8)
def test_a_rank_that_raises_ends_the_others_at_once(comm: MPI.Intracomm) -> None:
    from collectives.cuda.dense_p2p import DenseP2P

    dense = make(comm)
    array = put("cuda", np.ones(5000, np.float32))
    comm.Barrier()
    if comm.rank == 0:
        dense.abort()
    else:
        with pytest.raises(RuntimeError, match="rank 0 raised an error of its own"):
            summed(dense, array.copy())
    comm.Barrier()
    again = DenseP2P(dense.transport, dense._device)
    assert (summed(again, array) == comm.size).all()
    again.close()
    dense.close()


def test_arguments_that_do_not_fit_are_refused_before_anything_is_launched(
    comm: MPI.Intracomm, dense: Any
) -> None:
    import cupy

    array = put("cuda", np.ones(64, np.float32))
    with pytest.raises(ValueError, match="out overlaps array"):
        enqueue(dense, array[:32], array[16:48])
    with pytest.raises(ValueError, match="out overlaps addend"):
        dense.enqueue(array.data.ptr, array[40:].data.ptr, array[32:].data.ptr, 16, "float32")
    with pytest.raises(ValueError, match="one_shot takes no vector of 4000000 bytes"):
        enqueue(dense, cupy.zeros(10**6, np.float32), algorithm="one_shot")
    assert all(dense.can_run(dense.algorithm_for(2**i), 2**i) for i in range(2, 30))
    enqueue(dense, array[:0])  # nothing to sum
    dense.check()
