"""The line that a plan gives trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from oktopk import DistributedOptimizer
from oktopk.plan.rows import Row, line_of

pytestmark = pytest.mark.mpi
NOTHING: Any = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "-")


def test_the_line_to_paste_trains(comm: MPI.Intracomm) -> None:
    for row in (
        Row("union", 0.0125, "int4", "hosts", 4, *NOTHING),
        replace(Row("oktopk", 0.0625, "float32", "flat", 1, *NOTHING), grid=True),
    ):
        model = torch.nn.Linear(30, 20)
        names: dict[str, Any] = {
            "DistributedOptimizer": DistributedOptimizer,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        }
        exec(line_of(row), names)
        optimizer = names["optimizer"]
        before = model.weight.detach().clone()
        for _ in range(row.every):
            optimizer.zero_grad()
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
        with optimizer.agreed():
            assert not torch.equal(model.weight, before)
        report = optimizer.report
        assert (report.method, report.every) == (row.method, row.every)
        assert report.wire == row.wire or comm.size == 1
        assert (optimizer.reducer.settings.exchange == "grid") == row.grid
        optimizer.close()
