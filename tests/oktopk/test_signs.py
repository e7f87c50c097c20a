"""Signs: what a code holds, the step against an oracle, what is kept beside the residual, and updates by it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cpu import signs as codes
from collectives.cpu.signs import BLOCK, CODE_WORDS
from collectives.cuda.layouts import SIGN_BLOCK, SIGN_WORDS
from oktopk import DistributedOptimizer, GradientAllreduce, NonFiniteGradientError, levels
from oktopk.elastic import redistribute
from oktopk.methods.signs import Signs, sign_words
from tests.devices import DEVICES, get, put, use
from tests.inputs import GRADIENTS
from tests.training import flat, loss, network, train

pytestmark = [pytest.mark.host_cuda(ranks=0), pytest.mark.host_cuda(ranks=3)]


def coded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a vector's code decodes to, by blocks from its beginning."""
    blocks = (values[at : at + BLOCK] for at in range(0, len(values), BLOCK))
    return np.concatenate([np.where(np.signbit(block), -1, 1) * np.abs(block).mean() for block in blocks])


class Slices:
    """Which elements each step sends of a vector that is one part."""

    def __init__(self, ranks: int, length: int, density: float) -> None:
        self.width = ranks * BLOCK  # of a turn
        turns = math.ceil(length / self.width)
        slices = min(turns, round(length / math.ceil(density * length)))
        self.ends = [turns * number // slices for number in range(slices + 1)]
        self.next = 0

    def take(self) -> slice:
        begin, end = self.ends[self.next : self.next + 2]
        self.next = (self.next + 1) % (len(self.ends) - 1)
        return slice(begin * self.width, end * self.width)


def kept_by(reducer: GradientAllreduce, comm: MPI.Intracomm) -> NDArray[np.float64]:
    """What the ranks have kept beside their residuals, whatever they hold of the vector."""
    state = reducer.state_dict()["methods"]["signs"]
    whole, shard = np.zeros(reducer.length), None
    among: Any = reducer.transport
    if reducer.group is not None:
        among, shard = reducer.group.between, reducer.group.shard
        if shard is None:
            return comm.allreduce(whole)
    mine = Signs.unsent(state, among.rank, among.size, sum(state["parts"]))
    if mine is not None and shard is None:
        whole[:] = mine
    elif mine is not None:
        reducer.group.layout.insert(mine, shard, whole)
    return comm.allreduce(whole)


def due_to(reducer: GradientAllreduce, comm: MPI.Intracomm) -> NDArray[np.float64]:
    """What is still to be applied."""
    return comm.allreduce(reducer.gathered_residual().astype(np.float64))


def signs_on(device: str, comm: MPI.Intracomm, length: int, **settings: Any) -> GradientAllreduce:
    use(device, comm)
    return GradientAllreduce(comm, length, "signs", device=device, **({"average": False} | settings))


def test_no_block_has_elements_of_two_parts() -> None:
    assert (SIGN_BLOCK, SIGN_WORDS) == (BLOCK, CODE_WORDS)
    assert codes.block_bounds([1]).tolist() == [0, 1]
    assert codes.block_bounds([512]).tolist() == [0, 512]
    assert codes.block_bounds([0, 513, 0, 7, 1024, 0]).tolist() == [0, 512, 513, 520, 1032, 1544]


@pytest.mark.parametrize("owners", [1, 3])
@pytest.mark.parametrize("parts", [[1], [7], [511], [1003], [512, 0, 30, 1, 1200]])
def test_a_code_has_each_sign_and_the_mean_magnitude_of_its_block(parts: list[int], owners: int) -> None:
    length = sum(parts)
    values = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    values[::5] *= -0.0
    bounds = codes.block_bounds(parts)
    words = np.empty(owners * math.ceil((len(bounds) - 1) / owners) * CODE_WORDS, np.float32)
    codes.encode_signs(values, bounds, 0, owners, words)
    out = np.full(length, np.nan, np.float32)
    codes.write_signs(out, bounds, 0, owners, words, 1.0)
    expected = np.concatenate(
        [coded(part) for part in np.split(values.astype(np.float64), np.cumsum(parts)[:-1]) if len(part)]
    )
    assert np.allclose(out, expected, rtol=1e-6)
    assert np.array_equal(np.signbit(out), np.signbit(values))
    left = values.copy()
    codes.subtract_signs(left, bounds, 0, owners, words)
    assert np.array_equal(left, values - out)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_gpu_codes_and_sums_as_the_host_does(device: str) -> None:
    from collectives.cuda.device import Device
    from collectives.cuda.kernels import DeviceKernels

    gpu = DeviceKernels(Device())
    rng = np.random.default_rng(3)
    for parts, owners, first in (([1], 1, 0), ([511], 2, 0), ([5003, 40, 513], 3, 3), ([70_000], 2, 4)):
        length = sum(parts)
        values = (rng.standard_t(2, length) * 10.0 ** rng.integers(-44, 30, length)).astype(np.float32)
        values[length // 2 :: 7] = -0.0
        bounds = codes.block_bounds(parts)
        placed = gpu.place_bounds(bounds)
        rows = math.ceil((len(bounds) - 1 - first) / owners)
        words = np.empty(owners * rows * CODE_WORDS, np.float32)
        codes.encode_signs(values, bounds, first, owners, words)
        given, coded_there = put(device, values), put(device, np.zeros_like(words))
        gpu.encode_signs(given, placed, first, owners, coded_there)
        assert get(coded_there).tobytes() == words.tobytes()
        for name, more in (("subtract_signs", ()), ("write_signs", (0.3,))):
            mine, there = values.copy(), put(device, values)
            getattr(codes, name)(mine, bounds, first, owners, words, *more)
            getattr(gpu, name)(there, placed, first, owners, coded_there, *more)
            assert get(there).tobytes() == mine.tobytes()
        own = np.append(0, np.cumsum(np.diff(bounds)[::owners]))
        kept = rng.standard_normal(own[-1]).astype(np.float32)
        sums, summed = np.zeros_like(kept), put(device, np.zeros_like(kept))
        of_owner, first_own = gpu.place_bounds(own), first // owners
        assert codes.sum_signs(words, owners, own, first_own, kept, sums)
        assert gpu.sum_signs(coded_there, owners, of_owner, first_own, put(device, kept), summed)
        assert get(summed).tobytes() == sums.tobytes()
        kept[-1] = np.inf
        assert not codes.sum_signs(words, owners, own, first_own, kept, sums)
        assert not gpu.sum_signs(coded_there, owners, of_owner, first_own, put(device, kept), summed)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", GRADIENTS)
def test_each_step_is_an_oracles_and_nothing_is_lost(comm: MPI.Intracomm, device: str, kind: str) -> None:
    """But for rounding; ranks agree bit for bit, and words and messages are those of the formula."""
    for length, density in ((1, 0.5), (7, 1.0), (1003, 0.25), (5000, 0.5), (20_000, 0.1), (13_000, 0.3)):
        reducer = signs_on(device, comm, length, density=density)
        slices, rng = Slices(comm.size, length, density), np.random.default_rng((comm.rank, length))
        residuals, kept = np.zeros((comm.size, length)), np.zeros(length)
        for _ in range(7):
            gradient = GRADIENTS[kind](rng, length, comm.rank, comm.size)
            report = reducer.step(put(device, gradient))
            update = get(reducer.update)
            assert len(set(comm.allgather(update.tobytes()))) == 1, "the ranks disagree on the update"
            residuals += comm.allgather(gradient)
            near, due = 3e-7 * np.abs(residuals).max() * comm.size + 1e-42, residuals.sum(axis=0) + kept
            part = slices.take()
            sent = np.array([coded(each[part]) for each in residuals])
            kept[part] += sent.sum(axis=0)
            expected = np.zeros(length)
            expected[part] = coded(kept[part])
            close = np.isclose(update, expected, rtol=1e-4, atol=near)
            # what is zero but for rounding has either sign
            assert (np.abs(kept[~close]) <= near).all()
            assert np.allclose(np.abs(update), np.abs(expected), rtol=1e-4, atol=near)
            residuals, kept = (
                np.array(comm.allgather(get(reducer.residual)), np.float64),
                kept_by(reducer, comm),
            )
            assert np.allclose(due, residuals.sum(axis=0) + kept + update, rtol=0, atol=near)
            words = comm.allreduce(report.words) / comm.size
            assert words == sign_words(part.stop - part.start, comm.size)
            assert report.messages == 2 * (comm.size - 1)
        reducer.close()


@pytest.mark.mpi
def test_a_slice_has_the_share_of_the_density_and_all_elements_have_their_turn(comm: MPI.Intracomm) -> None:
    length = 40 * BLOCK * comm.size
    reducer = signs_on("cpu", comm, length, density=0.1)
    gradient = np.ones(length, np.float32)
    seen = np.zeros(length)
    for step in range(10):
        report = reducer.step(gradient)
        assert report.global_nnz == report.local_nnz == length // 10
        assert comm.allreduce(report.words) == comm.size * sign_words(length // 10, comm.size)
        assert np.array_equal(np.unique(reducer.update[reducer.update != 0]), [comm.size * (step + 1.0)])
        seen += reducer.update != 0
    assert (seen == 1).all()
    reducer.close()


@pytest.mark.mpi
def test_signs_have_settings_of_their_own(comm: MPI.Intracomm) -> None:
    reducer = signs_on("cpu", comm, 9000)
    assert reducer.settings.density == 0.5
    reducer.close()
    whole = signs_on("cpu", comm, 9000, density=1.0, dense_warmup_steps=1)
    reports = [whole.step(np.ones(9000, np.float32)) for _ in range(2)]
    assert [(report.method, report.global_nnz) for report in reports] == [("dense", 9000), ("signs", 9000)]
    whole.close()
    with pytest.raises(ValueError, match="wire 'int4' is not for signs"):
        signs_on("cpu", comm, 9000, wire="int4")


@pytest.mark.mpi
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_step_that_is_not_finite_changes_nothing(comm: MPI.Intracomm, device: str, nonfinite: str) -> None:
    """A NaN of one rank, and a sum that overflows though all gradients are finite."""
    length = 3000
    reducer = signs_on(device, comm, length, nonfinite=nonfinite, density=1.0)
    rng = np.random.default_rng(comm.rank)
    for _ in range(2):
        reducer.step(put(device, rng.integers(-9, 9, length).astype(np.float32)))
    before, kept = get(reducer.residual), kept_by(reducer, comm)
    bad = np.zeros(length, np.float32)
    if comm.rank == comm.size - 1:
        bad[5] = np.nan
    overflowing: list[Any] = [(np.full(length, 3e38, np.float32), [])] if comm.size > 1 else []
    for gradient, ranks in ((bad, [comm.size - 1]), *overflowing):
        given = put(device, gradient)
        if nonfinite == "skip":
            assert reducer.step(given).skipped
        else:
            with pytest.raises(NonFiniteGradientError) as caught:
                reducer.step(given)
            assert caught.value.ranks == ranks
        assert not get(reducer.update).any()
        near = 0 if nonfinite == "skip" else 1e-6 * float(np.nanmax(gradient))
        assert np.allclose(get(reducer.residual), before, rtol=0, atol=near)
        assert np.array_equal(kept_by(reducer, comm), kept)
    reducer.close()


@pytest.mark.mpi
def test_what_is_finite_is_applied_though_a_blocks_total_is_not(comm: MPI.Intracomm, device: str) -> None:
    reducer = signs_on(device, comm, 1000, density=1.0)
    reducer.step(put(device, np.full(1000, 5e36, np.float32)))
    assert np.allclose(get(reducer.update), comm.size * 5e36, rtol=1e-5)
    reducer.step(put(device, np.ones(1000, np.float32)))
    assert np.isfinite(get(reducer.update)).all()
    reducer.close()


@pytest.mark.mpi(min_size=2)
def test_an_owner_without_a_gradient_applies_what_it_keeps(comm: MPI.Intracomm) -> None:
    length, rng = 3000, np.random.default_rng(comm.rank)
    reducer, sizes = signs_on("cpu", comm, length, density=1.0), []
    for _ in range(100):
        missing = comm.rank == 0
        gradient = np.zeros(length) if missing else rng.standard_normal(length)
        reducer.step(gradient.astype(np.float32), absent=((0, length),) if missing else ())
        sizes.append(float(np.abs(kept_by(reducer, comm)).mean()))
    assert sizes[-1] < 2 * sizes[9]
    reducer.close()


@pytest.mark.mpi
def test_what_no_rank_has_a_gradient_of_gets_none_by_its_neighbours(comm: MPI.Intracomm) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(7, 7))
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, method="signs", sends="gradients"
    )
    for _ in range(3):
        optimizer.zero_grad()
        model[0](torch.ones(2, 5)).sum().backward()
        optimizer.step()
    assert not optimizer.reducer.residual[30:].any()
    assert not optimizer.reducer.update[30:].any()
    optimizer.close()


@pytest.mark.mpi
def test_nothing_is_taken_back_of_a_step_that_was_skipped(comm: MPI.Intracomm) -> None:
    reducer, rng = signs_on("cpu", comm, 3000, nonfinite="skip"), np.random.default_rng(comm.rank)
    for _ in range(3):
        reducer.step(rng.standard_normal(3000).astype(np.float32))
    due = due_to(reducer, comm)
    assert reducer.step(np.full(3000, np.nan, np.float32)).skipped
    reducer.take_back()
    assert np.array_equal(due_to(reducer, comm), due)
    reducer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_step_that_is_taken_back_loses_nothing(comm: MPI.Intracomm, nonfinite: str) -> None:
    length = 3000
    reducer = signs_on("cpu", comm, length, nonfinite=nonfinite)
    rng, put_in, came_out = np.random.default_rng(comm.rank), np.zeros(length), np.zeros(length)
    for step in range(6):
        gradient = rng.standard_normal(length).astype(np.float32)
        reducer.step(gradient)
        if step % 2:
            reducer.take_back()
            assert not reducer.update.any()
        came_out += reducer.update
        if step % 2 == 0 or nonfinite == "raise":  # what is taken back exactly is as if the step had not been
            put_in += gradient
    left = comm.allreduce(reducer.residual.astype(np.float64)) + kept_by(reducer, comm)
    assert np.allclose(comm.allreduce(put_in), came_out + left, rtol=0, atol=1e-4)
    reducer.close()


@pytest.mark.mpi
def test_a_run_goes_on_from_its_state_bit_for_bit(comm: MPI.Intracomm, device: str) -> None:
    length = 4000
    rng = np.random.default_rng(comm.rank)
    gradients = [rng.standard_normal(length).astype(np.float32) for _ in range(7)]
    whole = signs_on(device, comm, length)
    for gradient in gradients[:3]:
        whole.step(put(device, gradient))
    again = signs_on(device, comm, length)
    again.load_state_dict(whole.state_dict())
    for gradient in gradients[3:]:
        for reducer in (whole, again):
            reducer.step(put(device, gradient))
        assert get(again.update).tobytes() == get(whole.update).tobytes()
        assert get(again.residual).tobytes() == get(whole.residual).tobytes()
    state = whole.state_dict()
    for name, value, message in (
        ("next", -1, "go on at turn -1"),
        ("kept", np.zeros(3), "not float32"),
        ("kept", np.zeros(1, np.float32), "not float32"),
        ("kept", np.full_like(state["methods"]["signs"]["kept"], np.nan), "not finite"),
        ("parts", [length - 1], f"parts of {length - 1} elements"),
    ):
        changed = {name: value} if comm.rank == comm.size - 1 else {}
        damaged = {**state, "methods": {"signs": state["methods"]["signs"] | changed}}
        with pytest.raises(ValueError, match=message):
            again.load_state_dict(damaged)
    another = {**state["methods"]["signs"], "next": comm.rank}
    if comm.size > 1:
        with pytest.raises(ValueError, match="ranks disagree"):
            again.load_state_dict({**state, "methods": {"signs": another}})
    for reducer in (whole, again):
        reducer.close()


@pytest.mark.mpi(min_size=2)
def test_on_another_number_of_ranks_what_was_kept_is_in_the_residuals(comm: MPI.Intracomm) -> None:
    length = 4000
    reducer = signs_on("cpu", comm, length)
    rng = np.random.default_rng(comm.rank)
    for _ in range(5):
        reducer.step(rng.standard_normal(length).astype(np.float32))
    due = comm.allreduce(reducer.residual.astype(np.float64)) + kept_by(reducer, comm)
    assert np.allclose(comm.allreduce(reducer.gathered_residual().astype(np.float64)), due, atol=1e-5)
    states = comm.allgather(reducer.state_dict())
    reducer.close()
    for ranks in (1, comm.size + 1):
        made = [redistribute(states.__getitem__, comm.size, rank, ranks) for rank in range(ranks)]
        assert all(state["methods"] == {} for state in made)
        assert np.allclose(sum(state["residual"].astype(np.float64) for state in made), due, atol=1e-5)
    alone = signs_on("cpu", MPI.COMM_SELF, length)
    alone.load_state_dict(redistribute(states.__getitem__, comm.size, 0, 1))
    assert np.allclose(alone.residual, due, atol=1e-5)
    alone.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_between_hosts_nothing_is_lost(
    comm: MPI.Intracomm, device: str, nonfinite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of two ranks, the last perhaps of one: also where one shard's sum overflows, and the others' does not."""
    monkeypatch.setattr(levels, "BLOCK", 600)
    length, far = 5000, slice(1800, None)  # from huge values, with which these share no magnitude
    settings: dict[str, Any] = {
        "levels": "hosts",
        "ranks_per_host": 2,
        "peer_memory": device == "cuda" or None,
    }
    settings |= {"nonfinite": nonfinite, "density": 1.0}  # so that each step sends the huge values
    reducer = signs_on(device, comm, length, **settings)
    assert reducer.levels == "hosts"
    rng, put_in, came_out = np.random.default_rng(comm.rank), np.zeros(length), np.zeros(length)
    for step in range(8):
        gradient = rng.standard_normal(length).astype(np.float32)
        if step in (3, 4):
            gradient[:600] = 3e38 if step == 3 and comm.rank in (0, comm.size - 1) else 1e6
            before = due_to(reducer, comm)
        if step != 3:
            report = reducer.step(put(device, gradient))
            put_in += gradient
        elif nonfinite == "skip":
            assert reducer.step(put(device, gradient)).skipped
        else:
            with pytest.raises(NonFiniteGradientError):
                reducer.step(put(device, gradient))
        update = get(reducer.update)
        assert len(set(comm.allgather(update.tobytes()))) == 1
        came_out += update
        if step == 3:
            assert not update.any()
            near = 0.0 if nonfinite == "skip" else 1e-6 * 3e38
            assert np.allclose(due_to(reducer, comm)[:600], before[:600], rtol=0, atol=near)
            continue
        assert report.global_nnz == report.local_nnz == length
        left = due_to(reducer, comm)
        assert np.allclose(comm.allreduce(put_in)[far], (came_out + left)[far], rtol=0, atol=1e-3)
    whole = comm.allreduce(reducer.gathered_residual())
    assert np.allclose(whole[far], due_to(reducer, comm)[far], rtol=0, atol=1e-3)
    states = comm.allgather(reducer.state_dict())
    again = signs_on(device, comm, length, **settings)
    again.load_state_dict(states[comm.rank])
    flat_state = redistribute(states.__getitem__, comm.size, comm.rank, comm.size)
    total = comm.allreduce(flat_state["residual"].astype(np.float64))
    assert np.allclose(total[far], due_to(reducer, comm)[far], rtol=0, atol=1e-3)
    gradient = rng.standard_normal(length).astype(np.float32)
    for each in (reducer, again):
        each.step(put(device, gradient))
    assert get(again.update).tobytes() == get(reducer.update).tobytes()
    for each in (reducer, again):
        each.close()


@pytest.mark.mpi
@pytest.mark.parametrize("every", [1, 2])
def test_adamw_trains_by_signs_of_its_updates(comm: MPI.Intracomm, every: int) -> None:
    """References are equal on all ranks; each rank's own parameters are the reference less all it has not sent."""
    model = network()
    optimizer: Any = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        comm=comm,
        method="signs",
        every=every,
    )
    assert optimizer.reducer.settings.density == 0.5
    losses = []
    for step in range(40):
        (error,) = train(model, optimizer, comm.rank, range(step, step + 1))
        losses.append(comm.allreduce(error) / comm.size)
        assert all(parameter.grad is not None for parameter in model.parameters())
        if (step + 1) % every == 0:
            own, residual = flat(model), optimizer.reducer.residual
            with optimizer.agreed():
                agreed = flat(model)
            assert len(set(comm.allgather(agreed.tobytes()))) == 1
            assert np.array_equal(own, agreed - residual)
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    optimizer.close()


@pytest.mark.mpi
@pytest.mark.parametrize("first", [0, 4])
def test_a_parameter_without_a_gradient_stays_as_it_is(comm: MPI.Intracomm, first: int) -> None:
    """Though it had one in the first steps, so that residuals and owners hold what was not applied, and that is kept."""
    model = network()
    model.append(torch.nn.Linear(7, 7))  # which later losses do not read
    optimizer: Any = DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), comm=comm, method="signs"
    )
    unused = list(model[-1].parameters())
    part = slice(optimizer.length - 56, optimizer.length)

    def train(whole: bool) -> None:
        optimizer.zero_grad()
        loss(model if whole else model[:-1], comm.rank, int(whole)).backward()
        optimizer.step()

    for _ in range(first):
        train(True)
    before, held = [p.detach().clone() for p in unused], optimizer.reducer.state_dict()
    kept = kept_by(optimizer.reducer, comm)[part] if first else np.zeros(56)
    for _ in range(4):
        train(False)
    assert all(torch.equal(one, other) for one, other in zip(unused, before, strict=True))
    assert np.array_equal(kept_by(optimizer.reducer, comm)[part], kept)
    left = optimizer.reducer.state_dict()["residual"][part]
    assert np.array_equal(left, held["residual"][part] if first else np.zeros(56, np.float32))
    assert first == 0 or kept.any() or comm.size == 1
    optimizer.close()
