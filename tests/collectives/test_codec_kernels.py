"""Coded entries on a GPU: the host's bytes, errors and entries, and damage that is found there; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.codec import VALUE_BITS, wire_layout
from collectives.sparse import ENTRY
from tests.collectives.test_codec import BITS, DAMAGE, Wire, damaged, damages
from tests.devices import on_gpus
from tests.inputs import UGLY_LISTS, entries_with

pytestmark = [on_gpus, pytest.mark.host_cuda(ranks=0)]


def check(name: str, sides: list[Wire], entries: NDArray[np.void], lower: int, upper: int) -> None:
    host, gpu = sides
    for side in sides:
        side.codec.start()
    (wire, errors), (found, left) = (side.encode(entries, lower, upper) for side in sides)
    assert found.tobytes() == wire.tobytes()
    assert left.tobytes() == errors.tobytes()
    # denormal numbers may count as zero in sums
    least = 0 if "denormal" not in name else 2 * host.codec.rounding[1]
    assert gpu.codec.rounding == pytest.approx(host.codec.rounding, rel=1e-12, abs=least)
    decoded = [side.decode(wire, len(entries), lower, upper).tobytes() for side in sides]
    assert decoded[0] == decoded[1]
    assert [side.codec.take_damage() for side in sides] == ["", ""]


@pytest.mark.parametrize("name", BITS)
def test_a_gpu_codes_as_the_host_does(name: str) -> None:
    sides = [Wire(name, on_gpu) for on_gpu in (False, True)]
    for make in UGLY_LISTS.values():
        check(name, sides, *make())
    rng = np.random.default_rng(8)
    for count, length in ((255, 10_000), (257, 300), (20_000, 2_000_000), (9000, 2**31 - 1)):
        indices = np.unique(rng.integers(0, length, count))
        values = rng.standard_t(2, len(indices)) * 10.0 ** rng.integers(-30, 30, len(indices))
        check(name, sides, entries_with(indices, values), 0, length)
    # words of the bitmap without a bit between, before and after the entries
    clusters = np.concatenate([np.arange(a, a + n) for a, n in ((70_000, 31), (90_000, 226), (600_000, 300))])
    check(name, sides, entries_with(clusters, rng.standard_normal(len(clusters))), 0, 1_000_000)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_gpu_rounds_every_value_to_the_hosts_code(name: str) -> None:
    rng, most = np.random.default_rng(12), 2 ** (VALUE_BITS[name] - 1) - 1
    groups = []
    for span in [*range(1, 255), *rng.integers(255, 4097, 40), *2 ** rng.integers(13, 30, 20)]:
        offsets = np.arange(1, 255) % (span + 1)  # all of them
        if span > 254:  # those beside a code, and beside the middle of two
            near = rng.integers(0, 2 * most + 1, 254) * span / (2 * most)
            offsets = np.clip(np.round(near) + rng.integers(-1, 2, 254), 0, span)
        low = rng.integers(1, 0x7F7FFFFF - span)
        groups.append(low + np.concatenate([[0, span], offsets.astype(np.int64)]))
    bits = np.concatenate(groups).astype(np.uint32)
    bits |= rng.integers(0, 2, len(bits), np.uint32) << np.uint32(31)
    entries = entries_with(np.arange(len(bits)), bits.view(np.float32))
    check(name, [Wire(name, on_gpu) for on_gpu in (False, True)], entries, 0, len(bits))


@pytest.mark.parametrize("name", BITS)
def test_a_gpu_notes_damage_as_the_host_does(name: str) -> None:
    rng = np.random.default_rng(4)
    indices = np.sort(rng.choice(30_000, 9000, replace=False)) + 100  # more than one tile
    host, gpu = (Wire(name, on_gpu) for on_gpu in (False, True))
    for kind in DAMAGE:
        if not damages(name, kind):
            continue
        wire, _ = host.encode(entries_with(indices, rng.standard_normal(9000)), 100, 30_100)
        damaged(kind, wire.view(np.uint32), wire_layout(BITS[name], 9000, 100, 30_100))
        decoded = [side.decode(wire, 9000, 100, 30_100) for side in (host, gpu)]
        assert decoded[0].tobytes() == decoded[1].tobytes(), kind
        assert not decoded[1]["value"].any()
        found = [side.codec.take_damage() for side in (host, gpu)]
        assert found[0] == found[1] != "", kind
    if name == "indices":
        return
    for bad in ([(4, 1.0), (9, 1.0)], [(4, 1.0), (4, 1.0)], [(4, 1.0), (5, np.inf)]):  # too short to code
        found = []
        for side in (host, gpu):
            assert not side.decode(np.array(bad, ENTRY), 2, 0, 9)["value"].any()
            found.append(side.codec.take_damage())
        assert found[0] == found[1] != ""


def test_values_are_cut_as_on_the_host() -> None:
    rng = np.random.default_rng(9)
    one, other = (entries_with(np.arange(300), rng.standard_normal(300) * 1e-44) for _ in range(2))
    results = []
    for side in (Wire("int8", False), Wire("int8", True)):
        given = side.put(one)
        side.codec.cut_errors(given, side.put(other))
        results.append(side.get(given).tobytes())
    assert results[0] == results[1]
