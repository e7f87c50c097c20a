"""Compares what experiments should show with what was measured: the verdicts of a report.

A figure that was not measured is NaN, and a claim that needs one is open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jobs.experiment.model import Experiment
from jobs.report.groups import Group, is_captured, timed_by_stage
from jobs.report.page import Claim

MARGIN = 0.002  # of accuracy that a sparse method may lose
WORD_ERROR_RATE = 0.309  # of the paper's LSTM
WORD_MARGIN = 0.01  # of word error rate that a sparse method may lose: 8 words of AN4's test set
SHARE_OF_DATA = 0.02  # of a step that may be spent waiting for a batch
DEVIATION = 0.05  # of nnz from k


def sparse_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """Claims of image classification: dense reaches the target, if any, and Ok-Topk equals dense."""
    dense, oktopk = accuracy(only(groups, "dense")), accuracy(only(groups, "oktopk"))
    target, claims = experiment.target, []
    if target is not None:
        text = f"dense reaches {target:.0%} held-out accuracy"
        claims.append(claim(text, dense >= target, "{:.2%} on average", dense))
    text = f"Ok-Topk's mean accuracy is at least dense's − {100 * MARGIN:.1f} points"
    claims.append(claim(text, oktopk >= dense - MARGIN, "{:+.2f} points", 100 * (oktopk - dense)))
    return [*claims, *volume_claims(groups), step_claim(fast)]


def speech_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """Claims of speech recognition, on word error rates; accuracies are 1 - word error rate."""
    dense, oktopk = (1 - accuracy(only(groups, method)) for method in ("dense", "oktopk"))
    text = f"mean word error rate is below {WORD_ERROR_RATE}, the paper's"
    more = f"Ok-Topk's mean word error rate is at most dense's + {WORD_MARGIN}"
    return [
        claim(f"dense's {text}", dense < WORD_ERROR_RATE, "{:.3f}", dense),
        claim(f"Ok-Topk's {text}", oktopk < WORD_ERROR_RATE, "{:.3f}", oktopk),
        claim(more, oktopk - dense <= WORD_MARGIN, "{:+.4f}", oktopk - dense),
        *volume_claims(groups),
        step_claim(fast),
    ]


def volume_claims(groups: Sequence[Group]) -> list[Claim]:
    """Claims on words, ξ, applied entries, and the wait for data."""
    oktopk = only(groups, "oktopk")
    words = figure(oktopk, "words_sparse_steps") / figure(oktopk, "upper_bound_words")
    xi, high = figure(oktopk, "xi_largest"), figure(oktopk, "xi_share_not_below_ranks")
    deviation = figure(oktopk, "global_nnz_deviation")
    complete = [group for group in groups if group.counted[0].complete]
    shares = [figure(group, "part_data_seconds") / figure(group, "step_seconds") for group in complete]
    waiting = max(shares, default=math.nan)
    bound = "Ok-Topk sends at most 6k(P−1)/P words a step, mean over its steps after the warm-ups"
    below = oktopk is not None and xi < oktopk.ranks
    samples = "{:.2f} at most; {:.1%} of the samples are not below P"
    waits = f"waiting for data takes less than {SHARE_OF_DATA:.0%} of a step, with any method"
    applied = f"Ok-Topk applies k entries to within {DEVIATION:.0%} on average"
    return [
        claim(bound, words <= 1, "{:.2f} of the bound", words),
        claim("Ok-Topk's ξ stays below P", below, samples, xi, high),
        claim(applied, deviation <= DEVIATION, "{:.2%}", deviation),
        claim(waits, waiting < SHARE_OF_DATA, "{:.2%} at most", waiting),
    ]


def step_claim(fast: Sequence[Group], where: str = "") -> Claim:
    """A step beside NCCL's on the most ranks, and what it is of DDP's; where: in words, what the groups have in common."""
    size = max((group.ranks for group in fast), default=0)
    compared = [only(on_ranks(fast, size), method) for method in ("oktopk", "nccl", "ddp")]
    oktopk, nccl, ddp = (figure(group, "step_seconds") for group in compared)
    replayed = [group is not None and is_captured(group) for group in compared]
    eager = " without CUDA graphs" if replayed[0] and not replayed[2] else ""
    beside = "" if math.isnan(oktopk / ddp) else f", {oktopk / ddp:.2f} of DDP's{eager}"
    text = f"Ok-Topk's step is at least as fast as with NCCL's flat allreduce, exact steps included{where}"
    return claim(text, oktopk <= nccl, f"{{:.2f}} of NCCL's time{beside} on {size} GPUs", oktopk / nccl)


def region_claim(groups: Sequence[Group]) -> Claim:
    """Claim that balanced regions have a smaller busiest region than equal ones."""
    by_kind = {
        group.runs[0].config.get("reduction", {}).get("balanced_regions", True): group
        for group in groups
        if group.counted[0].complete
    }
    balanced, equal = (figure(by_kind.get(kind), "region_balance") for kind in (True, False))
    text = "Balanced regions leave the busiest one fewer entries than regions of equal length"
    return claim(text, balanced < equal, "{:.2f} of the mean, with equal ones {:.2f}", balanced, equal)


def claim(text: str, holds: bool, form: str, *values: float) -> Claim:
    """A claim, with figures written as `form` says; open where one of them was not measured."""
    finite = not any(math.isinf(value) for value in values)
    if finite and any(math.isnan(value) for value in values):
        return Claim(text, "open", "not measured")
    return Claim(text, "held" if holds and finite else "failed", form.format(*values))


def only(groups: Sequence[Group], method: str) -> Group | None:
    """The method's first group, if it has a complete run; none that was timed by stage."""
    complete = [group for group in groups if group.method == method and group.counted[0].complete]
    return next((group for group in complete if not timed_by_stage(group)), None)


def on_ranks(groups: Sequence[Group], size: int) -> list[Group]:
    """The groups of so many ranks."""
    return [group for group in groups if group.ranks == size]


def figure(group: Group | None, name: str) -> float:
    """A figure as Group.total; NaN where it was not measured, and infinite where it was no number."""
    value = None if group is None else group.total(name)
    return math.nan if value is None else math.inf if math.isnan(value) else value


def accuracy(group: Group | None) -> float:
    """The mean held-out accuracy."""
    return figure(group, "held_out_accuracy")
