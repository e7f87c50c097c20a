"""The ablation: each idea can be taken away, changes what it should, and never the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.bench.contestants import variants
from jobs.bench.document import read
from oktopk import Settings
from tests.launched import PATIENCE, run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_variant_differs_from_the_full_method_in_valid_settings(ranks: int) -> None:
    found = variants(ranks)
    assert found[0].settings == {}
    assert len({one.name for one in found}) == len(found)
    for one in found:
        Settings(**one.settings)
    changed = {name for one in found for name in one.settings}
    assert changed == {"balanced_regions", "rotate", "bucket_rounds", "balance_trigger"}


@pytest.mark.long("an ablation; `make test` has what its settings do in a step")
@pytest.mark.timeout(PATIENCE)
def test_regions_and_balancing_spare_the_busiest_rank(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    words = ["--ablate", "--length", "300000", "--steps", "8", "--warmup", "20"]
    done = run_ranks(4, "-m", "jobs.bench", *words, "--set", "threshold_interval=8", "--json", str(path))
    assert done.returncode == 0, done.stderr
    content = read(path)
    assert content["kind"] == "ablation"
    (entry,) = content["runs"]
    methods = {method["name"]: method for method in entry["methods"]}
    assert "mean / full's" in done.stdout
    busiest = {name: method["words"]["busiest"] for name, method in methods.items()}
    assert busiest["full"] < busiest["uniform regions"]
    assert busiest["uniform, balance at 1.0"] < busiest["uniform, balance off"]
    # four ranks never reach a trigger of four
    for same in ("balance off", "no rotation", "bucket of 1", "bucket of 3, all"):
        assert methods[same]["words"] == methods["full"]["words"]
        assert methods[same]["series"]["global_nnz"] == methods["full"]["series"]["global_nnz"]
    assert methods["uniform, balance at 1.0"]["messages"]["mean"] > methods["full"]["messages"]["mean"]
