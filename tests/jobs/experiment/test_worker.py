"""The runs of one launch, one after another in this process."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from jobs.config.config import Config
from jobs.config.file import apply_overrides
from jobs.experiment.__main__ import parse
from jobs.experiment.plan import plan
from jobs.experiment.worker import main as work
from jobs.train.setup import build_workload
from jobs.train.tasks.task import Workload
from tests.small_experiment import VGG, small


def test_nothing_of_a_run_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse([*small(tmp_path), "--ranks", "1", "--epochs", "1", "--seeds", "1", "--speed-steps", "0"])
    first = plan(VGG, options)[0]
    entries: list[dict[str, Any]] = []
    networks: list[weakref.ref[Any]] = []
    runs = (("oktopk",), ("dense",), ("diverging", "optimizer.lr=1e30"), ("ddp",))
    for name, *changed in runs:
        method = "ddp" if changed else name
        if name == "dense":
            changed += ["reduction.overlap=true", "reduction.deferred=false"]
        changed += [f"reduction.method={method}", f"run.file={tmp_path / name}.h5", "run.measure_every=0"]
        changed += ["training.steps=3"]
        entries.append({"name": name, "document": apply_overrides(first.document, changed)})

    def build(config: Config, **others: Any) -> Workload:
        assert not [network for network in networks if network() is not None]
        workload = build_workload(config, **others)
        networks.append(weakref.ref(workload.model))
        return workload

    monkeypatch.setattr("jobs.experiment.worker.build_workload", build)
    paths = [tmp_path / "plan.json", tmp_path / "outcome.json"]
    paths[0].write_text(json.dumps({"trials": entries}))
    assert work(list(map(str, paths)), comm=MPI.COMM_SELF) == 1
    failed = json.loads(paths[1].read_text())["failed"]
    assert list(failed) == ["diverging"], failed
    assert [network() for network in networks] == [None] * len(runs)
