"""The experiments: an entry of EXPERIMENTS for each table of results."""

from __future__ import annotations

from typing import Any

from jobs.experiment.claims import WORD_ERROR_RATE, sparse_claims, speech_claims
from jobs.experiment.language_claims import language_claims, next_token_claims
from jobs.experiment.model import Experiment
from jobs.experiment.trials import SUMMED_ELSEWHERE

EVERY_METHOD = ("dense", "oktopk", "dense-ovlp", "topka", "topkdsa", "gtopk", "gaussiank")
# a number that no interval of thresholds divides: both exact and regular steps are met
MEASURE_EVERY = 50
# A warm-up that times leave out and one period of BERT's exact thresholds: their share of the steps is that of a long run.
ONE_PERIOD = 20 + 128

RIVALS: dict[str, dict[str, Any]] = {
    "ddp-float32": {"reduction.method": "ddp", "reduction.gradient_type": "float32"},
    "ddp-bfloat16": {"reduction.method": "ddp", "reduction.gradient_type": "bfloat16"},
    **{
        f"powersgd-{rank}": {
            "reduction.method": "powersgd",
            "reduction.gradient_type": "float32",
            "reduction.powersgd_rank": rank,
        }
        for rank in (1, 2, 4)
    },
}

_UPDATES: dict[str, Any] = {
    "reduction.method": "oktopk",
    "reduction.sends": "updates",
    "reduction.deferred": False,
}
NEXT_TOKEN_RIVALS: dict[str, dict[str, Any]] = {
    "powersgd-4": RIVALS["powersgd-4"],
    "sparseloco-15": {
        "reduction.method": "sparseloco",
        "reduction.gradient_type": "float32",
        "reduction.sparseloco_steps": 15,
    },
    "oktopk-updates": _UPDATES,
    "oktopk-updates-4": {**_UPDATES, "reduction.every": 4, "reduction.density": 0.04},  # as many bytes
}

_COMMON: dict[str, Any] = {
    "settings": {"run.measure_every": MEASURE_EVERY, "checkpoint.keep": 1},
    "methods": EVERY_METHOD,
    "repeated": ("dense", "oktopk"),
    "fast": (*EVERY_METHOD, *SUMMED_ELSEWHERE),
}
EXPERIMENTS: dict[str, Experiment] = {
    "vgg": Experiment(
        title="VGG-16 with sparse and dense allreduce",
        config="vgg.toml",
        target=0.9,
        epoch_seconds=2.0,
        claims=sparse_claims,
        **_COMMON,
    ),
    "lstm": Experiment(
        title="LSTM on speech with sparse and dense allreduce",
        config="lstm.toml",
        target=1 - WORD_ERROR_RATE,
        epoch_seconds=10.0,
        claims=speech_claims,
        compares_regions=True,
        **_COMMON,
    ),
    "bert": Experiment(
        title="BERT pre-training with sparse and dense allreduce",
        config="bert.toml",
        claims=language_claims,
        step_seconds=0.1,
        seeds=2,
        speed_steps=ONE_PERIOD,
        speed_batches=(8, 256),  # the paper's, and one that keeps an H200 busy
        scaling=False,
        staged=True,
        swept={"reduction.threshold_interval": (32, 64, 128, 256), "reduction.density": (0.001, 0.01, 0.05)},
        **_COMMON,
    ),
    "gpt": Experiment(
        title="GPT pre-training with sparse and dense allreduce, PowerSGD and SparseLoCo",
        config="gpt.toml",
        claims=next_token_claims,
        step_seconds=0.1,
        speed_steps=ONE_PERIOD,
        scaling=False,
        rivals=NEXT_TOKEN_RIVALS,
        **{
            **_COMMON,
            "methods": ("dense", "oktopk"),
            "repeated": ("dense", "oktopk", *NEXT_TOKEN_RIVALS),
            "fast": ("dense", "oktopk", "nccl"),
        },
    ),
    "vit": Experiment(
        title="ViT-L/32 with sparse and dense allreduce, and PowerSGD",
        config="vit.toml",
        claims=sparse_claims,
        step_seconds=0.3,
        seeds=2,
        speed_steps=ONE_PERIOD,
        scaling=False,
        staged=True,
        rivals=RIVALS,
        buckets=(25.0, 100.0),
        **{**_COMMON, "fast": (*EVERY_METHOD, "nccl")},
    ),
}
