"""Summarises the samples of all ranks: one dict per contestant, as the JSON has it.

Time is seconds. Words and messages are those that a rank sends: their mean over the ranks, and the rank that sends
most, both averaged over the steps. Control traffic is apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import dense_words
from collectives.traffic import lower_bound, upper_bound
from jobs.bench.measure import Contestant, Samples
from oktopk.methods import METHODS
from oktopk.methods.gtopk import gtopk_busiest_words, gtopk_words
from oktopk.methods.topka import topka_words
from oktopk.methods.topkdsa import topkdsa_words
from oktopk.methods.union import union_words

TRAFFIC = ("words", "bytes_between", "messages", "control_words", "control_messages")
UNIONS = ("topka", "topkdsa", "gaussiank")
"""Methods whose update is the sum of all selections, up to kP entries."""


def summarize(contestant: Contestant, samples: Samples, length: int) -> dict[str, Any]:
    """Everything about one contestant in one run; see docs/results/method.md for the keys."""
    fields = samples.fields
    ranks, steps = fields["seconds"].shape
    slowest = fields["seconds"].max(axis=0)
    exact: NDArray[np.bool_] = fields["exact"].max(axis=0) > 0  # on any rank
    k = int(fields["k"][0, -1]) if steps else 0
    which: dict[str, NDArray[np.bool_]] = {"all": np.ones(steps, bool), "regular": ~exact, "exact": exact}
    return {
        "name": contestant.name,
        "method": contestant.method,
        "settings": contestant.settings,
        "counted": contestant.counted,
        "k": k,
        "steps": steps,
        "agreed": samples.agreed,
        "seconds": {kind: _times(slowest[chosen]) for kind, chosen in which.items()},
        "stages": {kind: _stages(samples, chosen) for kind, chosen in which.items()},
        **{name: _traffic(fields[name]) for name in TRAFFIC},
        "formulas": formulas(contestant.method, k, length, ranks),
        "nnz": _nnz(fields, k, contestant.method),
        "series": {
            "seconds": slowest.tolist(),
            "exact": exact.tolist(),
            "words": fields["words"].mean(axis=0).tolist(),
            "global_nnz": fields["global_nnz"][0].tolist(),
        },
    }


def _times(seconds: NDArray[np.float64]) -> dict[str, float] | None:
    """Steps, median, mean, least and most; None without steps."""
    if not len(seconds):
        return None
    return {
        "steps": len(seconds),
        "median": float(np.median(seconds)),
        "mean": float(seconds.mean()),
        "min": float(seconds.min()),
        "max": float(seconds.max()),
    }


def _stages(samples: Samples, chosen: NDArray[np.bool_]) -> dict[str, dict[str, float]] | None:
    """Seconds by stage: mean and median over the steps of the mean over the ranks; then the slowest and the least rank's.

    A rank that comes early to an exchange waits there: its least time, the latecomer's, is nearest to the exchange's own.
    "between" is what a rank's step took besides its stages.
    """
    if not chosen.any():
        return None
    stages = {name: values[:, chosen] for name, values in samples.stages.items()}
    total = samples.fields["seconds"][:, chosen]
    stages["between"] = np.maximum(total - sum(stages.values(), np.zeros_like(total)), 0)
    return {
        name: {
            "mean": float(values.mean()),
            "median": float(np.median(values.mean(axis=0))),
            "slowest": float(values.max(axis=0).mean()),
            "least": float(values.min(axis=0).mean()),
        }
        for name, values in stages.items()
    }


def _traffic(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean of float64[ranks, steps]; mean over the steps of the busiest rank; largest mean of a step."""
    return {
        "mean": float(values.mean()),
        "busiest": float(values.max(axis=0).mean()),
        "largest_step": float(values.mean(axis=0).max()),
    }


def _nnz(fields: dict[str, NDArray[np.float64]], k: int, method: str) -> dict[str, float | None]:
    """Entries, and their mean |count/k - 1|; that of the update is None where a method applies all that was selected."""
    applied, selected = fields["global_nnz"][0], fields["local_nnz"]
    wanted = METHODS[method].local_k(k, len(selected)) if method in METHODS else k
    deviation = np.abs(applied / k - 1)
    held_to_k = method not in UNIONS
    return {
        "local": float(selected.mean()),
        "global": float(applied.mean()),
        "local_deviation": float(np.abs(selected / wanted - 1).mean()),
        "global_deviation": float(deviation.mean()) if held_to_k else None,
        "global_deviation_largest": float(deviation.max()) if held_to_k else None,
    }


def formulas(method: str, k: int, length: int, ranks: int) -> dict[str, float]:
    """Words per rank by formula, those that apply: `least` and `most` of the mean, and `busiest`.

    They are for exactly k selected entries; a regular step selects a little more or less.
    """
    dense = dense_words(length, ranks)
    topka = topka_words(k, ranks)
    dsa_least, dsa_most = topkdsa_words(k, length, ranks)
    union_least, union_most = union_words([METHODS["union"].local_k(k, ranks)] * ranks, length)
    gtopk = gtopk_words(k, ranks)
    by_method: dict[str, dict[str, float]] = {
        "oktopk": {"least": lower_bound(k, ranks), "most": upper_bound(k, ranks)},
        "topka": {"least": topka, "most": topka},
        "gaussiank": {"least": topka, "most": topka},
        "topkdsa": {"least": dsa_least, "most": dsa_most},
        "union": {"least": union_least, "most": union_most},
        "nccl-bf16": {"least": dense / 2, "most": dense / 2},
        "gtopk": {"least": gtopk, "most": gtopk, "busiest": gtopk_busiest_words(k, ranks)},
    }
    return by_method.get(method, {"least": dense, "most": dense})
