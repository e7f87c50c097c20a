"""Ok-Topk with one idea taken away at a time."""

from __future__ import annotations

import math

from jobs.bench.measure import Contestant


def variants(ranks: int) -> list[Contestant]:
    """What an ablation on so many ranks compares; the first is Ok-Topk as it is."""
    settings: dict[str, dict[str, object]] = {
        "full": {},
        "uniform regions": {"balanced_regions": False},
        "no rotation": {"rotate": False},
        "bucket of 1": {"bucket_rounds": 1},
        f"bucket of {max(1, ranks - 1)}, all": {"bucket_rounds": max(1, ranks - 1)},
        "balance at 1.0": {"balance_trigger": 1.0},
        "balance off": {"balance_trigger": math.inf},
        "uniform, balance at 1.0": {"balanced_regions": False, "balance_trigger": 1.0},
        "uniform, balance off": {"balanced_regions": False, "balance_trigger": math.inf},
        "neither, no rotation": {"balanced_regions": False, "balance_trigger": math.inf, "rotate": False},
    }
    return [
        Contestant(name=name, method="oktopk", settings=dict(changes)) for name, changes in settings.items()
    ]
