"""Sums of the values of a list that all ranks know: order, bits, what rounding takes, bytes, and what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.codec import EXACT_WIRES, WIRES
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.sum_values import CodedValues, sum_values, value_words, values_layout
from tests.collectives.test_codec import Wire
from tests.devices import on_gpus
from tests.inputs import entries_with

LENGTHS = [0, 1, 7, 255, 257, 2_003]
SPREAD = {"bfloat16": 2**-8, "int8": 0.033, "int4": 0.34}
"""The largest error of a value that is not made zero, over it: of half a step between two magnitudes."""
TAKEN = {"bfloat16": 2**-8, "int8": 0.025, "int4": 0.25}
"""Of all magnitudes, at most."""
LEAST = {"bfloat16": 0.0, "int8": 2**-8, "int4": 2**-5}
"""The least magnitude, over the largest one of 256."""


def values_of(rank: int, count: int, seed: int = 0) -> NDArray[np.void]:
    rng = np.random.default_rng((rank, count, seed))
    values = rng.standard_t(3, count) * 10.0 ** rng.integers(-2, 3, count)
    values[rng.random(count) < 0.1] = 0
    return entries_with(3 * np.arange(count) + 2, values)


def codec_of(transport: MpiTransport, wire: str) -> CodedValues:
    return CodedValues(wire, transport.kernels, transport.workspace, transport.size)


def in_rotation(rank: int, everyone: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    total = everyone[rank].copy()
    for i in range(1, len(everyone)):
        total += everyone[(rank - i) % len(everyone)]
    return total


@pytest.mark.mpi
@pytest.mark.also(ranks=8)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("in_flight", "rotate"), [(8, True), (1, True), (2, False)])
def test_all_ranks_have_the_sums_and_what_rounding_took_stays(
    transport: MpiTransport, comm: MPI.Intracomm, wire: str, in_flight: int, rotate: bool
) -> None:
    codec = codec_of(transport, wire)
    for count in LENGTHS:
        own = values_of(comm.rank, count)
        sums = np.full(count, -1, ENTRY)
        sums["index"] = own["index"]
        given = [values_of(rank, count)["value"] for rank in range(comm.size)]
        transport.take_traffic()
        errors = sum_values(own, sums, transport, codec, in_flight, rotate)
        sent = transport.take_traffic()
        assert not codec.wait_for_nonfinite()
        assert len(set(comm.allgather(sums.tobytes()))) == 1
        assert np.array_equal(sums["index"], values_of(0, count)["index"])
        at = count * np.arange(comm.size + 1) // comm.size
        if wire in EXACT_WIRES:
            blocks = [in_rotation(rank, given)[at[rank] : at[rank + 1]] for rank in range(comm.size)]
            assert np.array_equal(sums["value"], np.concatenate(blocks))
        else:  # what was taken from own values and from sums, and what arrived
            kept = own["value"].astype(np.float64)
            kept[at[comm.rank] : at[comm.rank + 1]] += errors["value"]
            whole, scale = np.sum(given, axis=0, dtype=np.float64), np.sum(np.abs(given), axis=0)
            assert (np.abs(comm.allreduce(kept) + sums["value"] - whole) <= 1e-6 * (scale + 1e-30)).all()
            taken, mass = codec.rounding
            assert (taken > 0 or count <= 7) and taken <= TAKEN[wire] * mass
        assert comm.allreduce(sent.words) / comm.size == value_words(wire, count, comm.size)
        assert sent.control_bytes == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_what_is_not_finite_or_overflows_is_told_on_all_ranks(
    transport: MpiTransport, comm: MPI.Intracomm, wire: str, bad: float
) -> None:
    """The first sum of 3e38 on each rank is too large; Inf and NaN come of the last rank alone."""
    codec = codec_of(transport, wire)
    for value in (bad, 1.0):
        own, sums = values_of(comm.rank, 600), values_of(0, 600)
        if value == 3e38 or comm.rank == comm.size - 1:
            own["value"][0] = value
        sum_values(own, sums, transport, codec)
        assert codec.wait_for_nonfinite() == (value != 1.0)
        # damage, where a rank receives it: a rank's own values are finite
        assert comm.allreduce(int(codec.damaged)) == (not np.isfinite(value))
        codec.take_damage()


@pytest.mark.parametrize("wire", SPREAD)
def test_a_value_arrives_as_the_nearest_that_the_wire_has(wire: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal(1000) * 10.0 ** rng.integers(-4, 5, 1000)).astype(np.float32)
    values[[5, 300]] = 0
    values[700:] = 0  # blocks of nothing
    for given in (values, np.float32(1e-40) * values, np.full(1, -2.5, np.float32)):
        arrived, errors = round_trip(Wire("int8"), wire, given)
        assert np.array_equal(given - arrived, errors)
        for start in range(0, len(given), 256):
            block = given[start : start + 256].astype(np.float64)
            bound = np.maximum(
                SPREAD[wire] * np.abs(block), LEAST[wire] / 2 * 1.01 * np.abs(block).max() + 1e-38
            )
            assert (np.abs(arrived[start : start + 256] - block) <= bound).all()
            if wire != "bfloat16":
                largest = np.abs(block).argmax()
                assert arrived[start + largest] == block[largest]
                magnitudes = np.unique(np.abs(arrived[start : start + 256]))
                assert len(magnitudes) <= (8 if wire == "int4" else 128)
        assert (np.sign(arrived) * np.sign(given) >= 0).all()
    huge = np.array([3.4e38, -3.4e38, np.inf, 1.0], np.float32)
    arrived, _ = round_trip(Wire("int8"), wire, huge)
    assert not np.isfinite(arrived[2])
    assert wire != "bfloat16" or np.isfinite(arrived[[0, 1, 3]]).all()


def round_trip(side: Wire, wire: str, values: NDArray[np.float32]) -> tuple[Any, Any]:
    """What arrives, and the errors; the wire array lies in `side.last`."""
    codec = CodedValues(wire, side.codec._kernels, side.codec._workspace, 3)
    codec.start()
    given = side.put(entries_with(np.arange(len(values)), values))
    array = codec.buffer("wire", given, values_layout(wire, len(values)).words // 2)
    with np.errstate(invalid="ignore"):
        codec.encode_values(given, array, 2)
        out = side.put(entries_with(np.arange(len(values)), np.full(len(values), 7.0)))
        codec.write_values(array, out, 1)
        added = side.put(entries_with(np.arange(len(values)), np.ones(len(values))))
        codec.add_values(array, added, 1)
    codec.wait_for_nonfinite()
    side.last = side.get(array), side.get(added), codec.rounding, codec._report.copy()  # type: ignore[attr-defined]
    return side.get(out)["value"], side.get(given)["value"]


@on_gpus
@pytest.mark.host_cuda(ranks=0)
@pytest.mark.parametrize("wire", WIRES)
def test_a_gpu_codes_values_as_the_host_does(wire: str) -> None:
    rng = np.random.default_rng(5)
    for count in (1, 2, 9, 255, 256, 257, 5000):
        values = (rng.standard_t(2, count) * 10.0 ** rng.integers(-30, 30, count)).astype(np.float32)
        values[rng.random(count) < 0.2] = 0
        for scale in (1.0, 1e-30, 0.0, np.inf):
            given = values.copy()
            if not scale:  # blocks of denormal numbers, whose differences a GPU may take for zero
                given, scale = (10.0 ** rng.uniform(-44.5, -36.5, count)).astype(np.float32), 1.0
            if np.isinf(scale):
                given[count // 2] = -np.inf
            else:
                given *= np.float32(scale)
            host, gpu = Wire("int8"), Wire("int8", on_gpu=True)
            with np.errstate(all="ignore"):
                (arrived, errors), (found, left) = (round_trip(side, wire, given) for side in (host, gpu))
            assert np.array_equal(found, arrived, equal_nan=True)
            wires, added, rounding, reports = zip(host.last, gpu.last, strict=True)  # type: ignore[attr-defined]
            assert np.array_equal(added[0]["value"], added[1]["value"], equal_nan=True)
            assert (reports[0][:, 2:] == reports[1][:, 2:]).all()
            if np.isfinite(scale):
                assert wires[0].tobytes() == wires[1].tobytes()
                assert np.array_equal(errors, left)
                assert rounding[1] == pytest.approx(
                    rounding[0], rel=1e-12, abs=2 * rounding[0][1] if scale < 1 else 0
                )
