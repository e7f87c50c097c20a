"""What the doctor measures: sums by the library over each path, of which one wrong bit is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce
from oktopk.doctor import probe
from tests.devices import on_gpus

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_cuda(ranks=3)]


@pytest.fixture
def pair(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> MPI.Intracomm:
    """This rank and one other; alone, the last rank of an odd number."""
    monkeypatch.setattr(probe, "LENGTH", 2**12)
    return MPI.Intracomm(comm.Split(comm.rank // 2))


@pytest.mark.parametrize(
    "what", ["host", pytest.param("device", marks=on_gpus), pytest.param("peer", marks=on_gpus)]
)
def test_two_ranks_sum_and_say_how_fast(pair: MPI.Intracomm, what: str) -> None:
    if pair.size == 2:
        found = probe.sums(pair, *probe.EXCHANGES[what])
        if found["problem"] == "ranks share a GPU":
            pytest.skip("one GPU")
        assert found["problem"] == ""
        assert found["latency"] > 0 and found["bandwidth"] > 0
        assert ("gpus" in found) == (what != "host")


def test_one_wrong_bit_is_seen(pair: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    step = GradientAllreduce.step

    def wrong(self: GradientAllreduce, gradient: Any) -> Any:
        report = step(self, gradient)
        self.writable_update.view(np.uint32)[-1] ^= 1
        return report

    monkeypatch.setattr(GradientAllreduce, "step", wrong)
    if pair.size == 2:
        assert "the sum is not" in probe.sums(pair, *probe.EXCHANGES["host"])["problem"]
