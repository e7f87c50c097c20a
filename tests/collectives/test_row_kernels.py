"""Sums of rows on a GPU: the host's bits, ids and errors; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.cpu.rows import HostRowKernels
from collectives.element_types import ELEMENT_TYPES
from collectives.table_rows import LONGEST_ON_GPU, MOST_ON_GPU, Rows
from tests.devices import get, on_gpus, put
from tests.rows import narrowed, touched

pytestmark = [on_gpus, pytest.mark.host_cuda(ranks=0)]

HOST = HostRowKernels()
TYPES = list(ELEMENT_TYPES)


def kernels(kind: str) -> Any:
    from collectives.cuda.device import Device
    from collectives.cuda.rows import DeviceRowKernels

    return DeviceRowKernels(Device(), kind)


def assert_equal(device: tuple[Rows, int], host: tuple[Rows, int]) -> None:
    (sums, nonfinite), (expected, expected_nonfinite) = device, host
    assert sums.rows.dtype == expected.rows.dtype and nonfinite == expected_nonfinite
    assert get(sums.rows).tobytes() == expected.rows.tobytes()
    assert get(sums.values).tobytes() == expected.values.tobytes()


@pytest.mark.parametrize("width", [1, 7, 8, 516], ids=lambda width: f"{width} wide")
@pytest.mark.parametrize("kind", TYPES)
def test_rows_in_any_order_are_summed_as_the_host_does(kind: str, width: int) -> None:
    on_gpu = kernels(kind)
    # among them rows that come hundreds of times, and more tiles than one
    shapes = [(0, 9, False), (30, 60, False), (2500, 50, False), (300, 10**6, False), (4500, 900, True)]
    for count, length, skewed in shapes:
        each = touched(count, length, count, width, kind, skewed)
        for ids in (each.rows, *[each.rows.astype(np.int64)] * (width == 7)):
            sums = on_gpu.coalesce(put("cuda", ids), put("cuda", each.values), length, 0.5)
            assert_equal(sums, HOST.coalesce(ids, each.values, length, 0.5))


@pytest.mark.parametrize("above", [0, 1 << 32], ids=["short table", "long table"])
@pytest.mark.parametrize("ranks", [1, 5, 40])
def test_ascending_lists_are_summed_in_their_order(ranks: int, above: int) -> None:
    lists = [touched(rank, 60, 30 * (rank != 1), 5, "float16") for rank in range(ranks)]
    lists = [HOST.coalesce(each.rows, each.values, 60, 1.0)[0] for each in lists]
    rows, values = np.concatenate([r.rows for r in lists]), np.concatenate([r.values for r in lists])
    if above:
        rows = rows.astype(np.int64) + above
    firsts = np.cumsum([0, *map(len, lists)])[:-1]
    sums = kernels("float16").merge(put("cuda", rows), put("cuda", values), firsts, 0.2)
    assert_equal(sums, HOST.merge(rows, values, firsts, 0.2))


@pytest.mark.parametrize("ranks", [9, 32])
def test_lists_may_be_empty_or_hold_few_rows(ranks: int) -> None:
    on_gpu, values = kernels("float32"), np.arange(1, 33, dtype=np.float32)[:, None]
    for counts in ([1] + [0] * 8, [0] * 8 + [7], [0, 8] + [0] * 7, [9] + [0] * 8, [1] * 9, [1] * 8 + [0]):
        counts = [*counts, *[0] * (ranks - 9)]
        rows = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
        firsts, given = np.cumsum([0, *counts])[:-1], values[: len(rows)]
        sums = on_gpu.merge(put("cuda", rows), put("cuda", given), firsts, 1.0)
        assert_equal(sums, HOST.merge(rows, given, firsts, 1.0))


@pytest.mark.parametrize("lacking", ["keys", "marks", "ids"])
def test_without_memory_the_next_sum_is_right(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from collectives.cuda.device import Device

    on_gpu, few, many = kernels("float32"), touched(1, 50, 20, 3, "float32"), touched(2, 50, 90, 3, "float32")

    def coalesce(each: Rows, length: int = 50) -> tuple[Rows, int]:
        return on_gpu.coalesce(put("cuda", each.rows), put("cuda", each.values), length, 1.0)

    assert_equal(coalesce(few), HOST.coalesce(few.rows, few.values, 50, 1.0))
    allocate, wanted = Device.allocate, {"keys": np.uint64, "marks": np.uint32}

    def no_array(self: Device, count: int, dtype: Any) -> Any:
        if dtype == wanted[lacking]:
            raise MemoryError("out of memory")
        return allocate(self, count, dtype)

    def no_ids(count: int, dtype: Any) -> None:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        if lacking in wanted:
            patch.setattr(Device, "allocate", no_array)
        else:  # after a kernel has seen rows outside the table
            patch.setattr("collectives.cuda.rows.cupy.empty", no_ids)
        with pytest.raises(MemoryError):
            coalesce(many, 50 if lacking in wanted else 3)
    for each in (few, touched(3, 50, 25, 3, "float32"), many):
        assert_equal(coalesce(each), HOST.coalesce(each.rows, each.values, 50, 1.0))


def test_what_does_not_fit_in_keys_is_refused() -> None:
    on_gpu, one = kernels("float32"), put("cuda", np.ones((1, 1), np.float32))
    ids = put("cuda", np.zeros(1, np.int64))
    with pytest.raises(
        ValueError, match=f"at most {MOST_ON_GPU} rows of a table of at most {LONGEST_ON_GPU}"
    ):
        on_gpu.coalesce(ids, one, LONGEST_ON_GPU + 1, 1.0)
    with pytest.raises(ValueError, match=f"not {MOST_ON_GPU + 1} of"):
        on_gpu.merge_into(None, [], MOST_ON_GPU + 1, Rows(ids, one), 1.0)


def test_without_room_sums_lie_elsewhere_and_are_as_right() -> None:
    from collectives.cuda.device import address_of

    each, on_gpu = touched(3, 50, 40, 4, "float32"), kernels("float32")
    hot = np.full(30, 7, np.int32), np.ones((30, 4), np.float32)
    each = Rows(np.concatenate([each.rows, hot[0]]), np.concatenate([each.values, hot[1]]))
    each.values[-1, 2] = np.inf
    given = put("cuda", each.rows), put("cuda", each.values)
    expected = HOST.coalesce(each.rows, each.values, 50, 1.0)
    for room_for in (len(expected[0]), len(expected[0]) - 1):
        room = Rows(
            put("cuda", np.full(room_for, -1, np.int32)), put("cuda", np.zeros((room_for, 4), np.float32))
        )
        sums = on_gpu.coalesce(*given, 50, 1.0, room)
        assert expected[1] == 1
        assert_equal(sums, expected)
        assert (address_of(sums[0].rows) == address_of(room.rows)) == (room_for == len(expected[0]))
        assert get(room.values).any() == (room_for == len(expected[0]))


@pytest.mark.parametrize("kind", TYPES)
def test_elements_that_are_not_finite_are_counted(kind: str) -> None:
    rows = np.array([5, 2, 5, 1] + 30 * [7], np.int32)  # 7 is hot
    values = narrowed(
        np.array([[1, np.inf], [np.nan, 2], [3, -np.inf], [0, 0]] + 30 * [[3e38, 1]], np.float32), kind
    )
    expected = HOST.coalesce(rows, values, 8, 1.0)
    sums, nonfinite = kernels(kind).coalesce(put("cuda", rows), put("cuda", values), 8, 1.0)
    assert nonfinite == expected[1] == 3
    assert get(sums.rows).tolist() == [1, 2, 5, 7]


def test_a_long_table_has_64_bit_ids_and_names_those_outside() -> None:
    on_gpu, values = kernels("float32"), put("cuda", np.ones((3, 1), np.float32))
    rows = np.array([LONGEST_ON_GPU - 1, 5, LONGEST_ON_GPU - 1])
    sums, _ = on_gpu.coalesce(put("cuda", rows), values, LONGEST_ON_GPU, 1.0)
    assert get(sums.rows).tolist() == [5, LONGEST_ON_GPU - 1] and get(sums.values).tolist() == [[1.0], [2.0]]
    for bad, length in ((-1, 6), (6, 6), (1 << 40, LONGEST_ON_GPU), (-(1 << 62), LONGEST_ON_GPU)):
        with pytest.raises(ValueError, match=rf"row {bad} is not in \[0, {length}\)"):
            on_gpu.coalesce(put("cuda", np.array([2, bad, 3])), values, length, 1.0)
    assert get(on_gpu.coalesce(put("cuda", np.array([2, 2, 3])), values, 6, 1.0)[0].rows).tolist() == [2, 3]
