"""The experiments: which methods are trained how often and on how many ranks, and what they are to show.

One entry of EXPERIMENTS is one table of results; jobs.experiment runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.groups import Group
from jobs.page import Claim
from oktopk import METHODS

EVERY_METHOD = ("dense", "oktopk", "dense-ovlp", "topka", "topkdsa", "gtopk", "gaussiank")
SUMMED_ELSEWHERE = ("nccl", "ddp")  # GPUs only, and compared by speed alone
MARGIN = 0.002  # of accuracy that a sparse method may lose
WORD_ERROR_RATE = 0.309  # of the paper's LSTM
WORD_MARGIN = 0.01  # of word error rate that a sparse method may lose: 8 words of AN4's test set
SHARE_OF_DATA = 0.02  # of a step that may be spent waiting for a batch
DEVIATION = 0.05  # of nnz from k
# a number that no interval of thresholds divides: both exact and regular steps are met
MEASURE_EVERY = 50


@dataclass(frozen=True)
class Experiment:
    """A table of results.

    Attributes:
        title: of its report.
        config: file in jobs/configs that all runs start from; settings: "section.key" -> value, on top of it.
        methods: trained to the end, in this order; repeated: those of them that are trained with every seed.
        fast: methods that are compared by their speed on several numbers of ranks.
        target: held-out accuracy that dense must reach, and to which times are taken.
        epoch_seconds: how long an epoch is expected to take where nothing was measured yet.
        claims: what the runs are to show, of the groups trained to the end and those compared by speed.
    """

    title: str
    config: str
    settings: Mapping[str, Any]
    methods: tuple[str, ...]
    repeated: tuple[str, ...]
    fast: tuple[str, ...]
    target: float
    epoch_seconds: float
    claims: Callable[[Experiment, Sequence[Group], Sequence[Group]], list[Claim]]


@dataclass(frozen=True)
class Trial:
    """One run of an experiment.

    Attributes:
        name: of its run file.
        kind: "train", to the end, or "speed", a few steps.
        settings: "section.key" -> value, on top of everything else.
    """

    name: str
    kind: str
    method: str
    ranks: int
    seed: int
    settings: Mapping[str, Any]


def trials(
    experiment: Experiment,
    *,
    ranks: int,
    seeds: int,
    methods: Sequence[str],
    speed_ranks: Sequence[int],
    speed_steps: int,
    elsewhere: bool,
) -> list[Trial]:
    """Every run of an experiment, the most telling first, so that a table that is cut short is still one.

    Args:
        experiment: an entry of EXPERIMENTS.
        ranks: of the runs to the end.
        seeds: of the repeated methods.
        methods: those of the experiment that are wanted.
        speed_ranks, speed_steps: of the runs that are compared by speed; none where either is empty or 0.
        elsewhere: whether NCCL and DDP can run here, which are of GPUs.
    """
    planned = []
    for seed in range(seeds):
        for method in experiment.methods:
            if method in methods and (not seed or method in experiment.repeated):
                planned.append(_trial(f"{method}-{seed}", "train", method, ranks, seed, {}))
    fast = [name for name in experiment.fast if name in (*methods, *SUMMED_ELSEWHERE)]
    for size in sorted(speed_ranks, reverse=True) if speed_steps else ():
        for method in fast:
            if elsewhere or method not in SUMMED_ELSEWHERE:
                settings = {
                    "training.steps": speed_steps,
                    "training.eval_every": speed_steps,
                    # what is measured is the method, not how it starts
                    "reduction.dense_warmup_steps": 0,
                    "run.measure_every": 0,
                    # seconds long: begun again rather than continued
                    "run.overwrite": True,
                    "checkpoint.enabled": False,
                }
                planned.append(_trial(f"speed-{size}-{method}", "speed", method, size, 0, settings))
    return planned


def _trial(name: str, kind: str, method: str, ranks: int, seed: int, settings: Mapping[str, Any]) -> Trial:
    every = {"reduction.method": method, "training.seed": seed, **settings}
    if method not in METHODS:
        every["run.measure_every"] = 0  # a way of summing all gradients has nothing of the kind
    return Trial(name, kind, method, ranks, seed, every)


def sparse_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """What Ok-Topk is to show beside dense where images are classified."""
    dense, oktopk = _only(groups, "dense"), _only(groups, "oktopk")
    claims = [
        _claim(
            f"dense reaches {experiment.target:.0%} held-out accuracy",
            lambda: (_accuracy(dense), _accuracy(dense) >= experiment.target),
            "{:.2%} on average",
        ),
        _claim(
            f"Ok-Topk's mean accuracy is at least dense's − {100 * MARGIN:.1f} points",
            lambda: (
                100 * (_accuracy(oktopk) - _accuracy(dense)),
                _accuracy(oktopk) >= _accuracy(dense) - MARGIN,
            ),
            "{:+.2f} points",
        ),
    ]
    return claims + reduction_claims(groups, fast)


def speech_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """What Ok-Topk is to show beside dense where speech is recognised; accuracies are 1 - word error rate."""
    dense, oktopk = _only(groups, "dense"), _only(groups, "oktopk")
    claims = [
        _claim(
            f"{name}'s mean word error rate is below {WORD_ERROR_RATE}, the paper's",
            lambda group=group: (1 - _accuracy(group), 1 - _accuracy(group) < WORD_ERROR_RATE),  # type: ignore[misc]
            "{:.3f}",
        )
        for name, group in (("dense", dense), ("Ok-Topk", oktopk))
    ]
    claims.append(
        _claim(
            f"Ok-Topk's mean word error rate is at most dense's + {WORD_MARGIN}",
            lambda: (
                _accuracy(dense) - _accuracy(oktopk),
                _accuracy(oktopk) >= _accuracy(dense) - WORD_MARGIN,
            ),
            "{:+.4f}",
        )
    )
    return claims + reduction_claims(groups, fast)


def reduction_claims(groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """What Ok-Topk is to show whatever is trained."""
    oktopk = _only(groups, "oktopk")
    size = max((group.ranks for group in fast), default=0)
    widest = [group for group in fast if group.ranks == size]
    return [
        _claim(
            "Ok-Topk sends at most 6k(P−1)/P words a step, mean over its sparse steps",
            lambda: (
                _figure(oktopk, "words_sparse_steps") / _figure(oktopk, "upper_bound_words"),
                _figure(oktopk, "words_sparse_steps") <= _figure(oktopk, "upper_bound_words"),
            ),
            "{:.2f} of the bound",
        ),
        _claim(
            "Ok-Topk's ξ stays below P",
            lambda: (_largest(oktopk, "xi_largest"), _largest(oktopk, "xi_largest") < _ranks(oktopk)),
            "{:.2f} at most",
        ),
        _claim(
            f"Ok-Topk applies k entries to within {DEVIATION:.0%} on average",
            lambda: (
                _figure(oktopk, "global_nnz_deviation"),
                _figure(oktopk, "global_nnz_deviation") <= DEVIATION,
            ),
            "{:.2%}",
        ),
        _claim(
            f"waiting for data takes less than {SHARE_OF_DATA:.0%} of a step, with any method",
            lambda: (_data_share(groups), _data_share(groups) < SHARE_OF_DATA),
            "{:.2%} at most",
        ),
        _claim(
            "Ok-Topk's step is at least as fast as with NCCL's flat allreduce, exact steps included",
            lambda: (
                _figure(_only(widest, "oktopk"), "step_seconds")
                / _figure(_only(widest, "nccl"), "step_seconds"),
                _figure(_only(widest, "oktopk"), "step_seconds")
                <= _figure(_only(widest, "nccl"), "step_seconds"),
            ),
            f"{{:.2f}} of NCCL's time on {size} GPUs",
        ),
    ]


class _NotMeasured(Exception):  # noqa: N818 - no fault
    pass


def _claim(text: str, measure: Callable[[], tuple[float, bool]], form: str) -> Claim:
    try:
        value, holds = measure()
    except _NotMeasured:
        return Claim(text, "open", "not measured")
    return Claim(text, "held" if holds else "failed", form.format(value))


def _only(groups: Sequence[Group], method: str) -> Group | None:
    found = [group for group in groups if group.method == method and group.counted[0].complete]
    return found[0] if found else None


def _figure(group: Group | None, name: str) -> float:
    value = None if group is None else group.mean(name)
    if value is None:
        raise _NotMeasured
    return value


def _largest(group: Group | None, name: str) -> float:
    values = [] if group is None else group.values(name)
    if not values:
        raise _NotMeasured
    return max(values)


def _accuracy(group: Group | None) -> float:
    return _figure(group, "held_out_accuracy")


def _ranks(group: Group | None) -> int:
    if group is None:
        raise _NotMeasured
    return group.ranks


def _data_share(groups: Sequence[Group]) -> float:
    shares = [
        _figure(group, "part_data_seconds") / _figure(group, "step_seconds")
        for group in groups
        if group.counted[0].complete
    ]
    if not shares:
        raise _NotMeasured
    return max(shares)


EXPERIMENTS: dict[str, Experiment] = {
    "vgg": Experiment(
        title="VGG-16 with sparse and dense allreduce",
        config="vgg.toml",
        settings={"run.measure_every": MEASURE_EVERY, "checkpoint.keep": 1},
        methods=EVERY_METHOD,
        repeated=("dense", "oktopk"),
        fast=(*EVERY_METHOD, *SUMMED_ELSEWHERE),
        target=0.9,
        epoch_seconds=2.0,
        claims=sparse_claims,
    ),
    "lstm": Experiment(
        title="LSTM on speech with sparse and dense allreduce",
        config="lstm.toml",
        settings={"run.measure_every": MEASURE_EVERY, "checkpoint.keep": 1},
        methods=EVERY_METHOD,
        repeated=("dense", "oktopk"),
        fast=(*EVERY_METHOD, *SUMMED_ELSEWHERE),
        target=1 - WORD_ERROR_RATE,
        epoch_seconds=10.0,
        claims=speech_claims,
    ),
}
