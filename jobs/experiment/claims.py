"""What experiments are to show, held against what was measured: the verdicts of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jobs.experiment.model import Experiment
from jobs.report.groups import Group, is_captured, timed_by_stage
from jobs.report.page import Claim

MARGIN = 0.002  # of accuracy that a sparse method may lose
WORD_ERROR_RATE = 0.309  # of the paper's LSTM
WORD_MARGIN = 0.01  # of word error rate that a sparse method may lose: 8 words of AN4's test set
SHARE_OF_DATA = 0.02  # of a step that may be spent waiting for a batch
DEVIATION = 0.05  # of nnz from k


def sparse_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """What Ok-Topk is to show beside dense where images are classified; the experiment has a target."""
    dense, oktopk = only(groups, "dense"), only(groups, "oktopk")
    target = experiment.target or 1.0
    claims = [
        claim(
            f"dense reaches {target:.0%} held-out accuracy",
            lambda: (accuracy(dense), accuracy(dense) >= target),
            "{:.2%} on average",
        ),
        claim(
            f"Ok-Topk's mean accuracy is at least dense's − {100 * MARGIN:.1f} points",
            lambda: (
                100 * (accuracy(oktopk) - accuracy(dense)),
                accuracy(oktopk) >= accuracy(dense) - MARGIN,
            ),
            "{:+.2f} points",
        ),
    ]
    return claims + reduction_claims(groups, fast)


def speech_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """What Ok-Topk is to show beside dense where speech is recognised; accuracies are 1 - word error rate."""
    dense, oktopk = only(groups, "dense"), only(groups, "oktopk")
    claims = [
        claim(
            f"{name}'s mean word error rate is below {WORD_ERROR_RATE}, the paper's",
            lambda group=group: (1 - accuracy(group), 1 - accuracy(group) < WORD_ERROR_RATE),  # type: ignore[misc]
            "{:.3f}",
        )
        for name, group in (("dense", dense), ("Ok-Topk", oktopk))
    ]
    claims.append(
        claim(
            f"Ok-Topk's mean word error rate is at most dense's + {WORD_MARGIN}",
            lambda: (
                accuracy(dense) - accuracy(oktopk),
                accuracy(oktopk) >= accuracy(dense) - WORD_MARGIN,
            ),
            "{:+.4f}",
        )
    )
    return claims + reduction_claims(groups, fast)


def reduction_claims(groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """What Ok-Topk is to show whatever is trained."""
    return [*volume_claims(groups), step_claim(fast)]


def volume_claims(groups: Sequence[Group]) -> list[Claim]:
    """Of what is sent and applied, and of waiting for data."""
    oktopk = only(groups, "oktopk")
    return [
        claim(
            "Ok-Topk sends at most 6k(P−1)/P words a step, mean over its steps after the warm-ups",
            lambda: (
                figure(oktopk, "words_sparse_steps") / figure(oktopk, "upper_bound_words"),
                figure(oktopk, "words_sparse_steps") <= figure(oktopk, "upper_bound_words"),
            ),
            "{:.2f} of the bound",
        ),
        claim(
            "Ok-Topk's ξ stays below P",
            lambda: (
                (largest(oktopk, "xi_largest"), figure(oktopk, "xi_share_not_below_ranks")),
                largest(oktopk, "xi_largest") < ranks_of(oktopk),
            ),
            "{:.2f} at most; {:.1%} of the samples are not below P",
        ),
        claim(
            f"Ok-Topk applies k entries to within {DEVIATION:.0%} on average",
            lambda: (
                figure(oktopk, "global_nnz_deviation"),
                figure(oktopk, "global_nnz_deviation") <= DEVIATION,
            ),
            "{:.2%}",
        ),
        claim(
            f"waiting for data takes less than {SHARE_OF_DATA:.0%} of a step, with any method",
            lambda: (data_share(groups), data_share(groups) < SHARE_OF_DATA),
            "{:.2%} at most",
        ),
    ]


def step_claim(fast: Sequence[Group], where: str = "") -> Claim:
    """A step beside NCCL's on the most ranks, and what it is of DDP's; where: in words, what the groups have in common."""
    size = max((group.ranks for group in fast), default=0)
    widest = [group for group in fast if group.ranks == size]
    compared = [only(widest, method) for method in ("oktopk", "nccl", "ddp")]
    oktopk, nccl, ddp = (figure_or_none(group, "step_seconds") for group in compared)
    eager = " without CUDA graphs" if compared[0] is not None and is_captured(compared[0]) else ""
    beside = f", {oktopk / ddp:.2f} of DDP's{eager}" if oktopk and ddp else ""

    def measure() -> tuple[float, bool]:
        if oktopk is None or nccl is None:
            raise NotMeasured
        return oktopk / nccl, oktopk <= nccl

    return claim(
        f"Ok-Topk's step is at least as fast as with NCCL's flat allreduce, exact steps included{where}",
        measure,
        f"{{:.2f}} of NCCL's time{beside} on {size} GPUs",
    )


def region_claim(groups: Sequence[Group]) -> Claim:
    """That balanced regions balance, of Ok-Topk with regions of both kinds."""
    by_kind = {
        group.runs[0].config.get("reduction", {}).get("balanced_regions", True): group
        for group in groups
        if group.counted[0].complete
    }
    equal = None if False not in by_kind else by_kind[False].mean("region_balance")
    beside = "" if equal is None else f" of the mean, with equal ones {equal:.2f}"
    return claim(
        "Balanced regions leave the busiest one fewer entries than regions of equal length",
        lambda: (
            figure(by_kind.get(True), "region_balance"),
            figure(by_kind.get(True), "region_balance") < figure(by_kind.get(False), "region_balance"),
        ),
        f"{{:.2f}}{beside}",
    )


class NotMeasured(Exception):  # noqa: N818 - no fault
    """A figure that a claim needs is not there."""


def claim(text: str, measure: Callable[[], tuple[float | tuple[float, ...], bool]], form: str) -> Claim:
    """A claim by what `measure` gives: a figure or some, written as `form` says, and whether the claim holds."""
    try:
        values, holds = measure()
    except NotMeasured:
        return Claim(text, "open", "not measured")
    written = form.format(*values) if isinstance(values, tuple) else form.format(values)
    return Claim(text, "held" if holds else "failed", written)


def only(groups: Sequence[Group], method: str) -> Group | None:
    """The method's first group, if it has a complete run; none that was timed by stage."""
    complete = [group for group in groups if group.method == method and group.counted[0].complete]
    found = [group for group in complete if not timed_by_stage(group)]
    return found[0] if found else None


def figure_or_none(group: Group | None, name: str) -> float | None:
    """The mean of a figure, None where it was not measured."""
    return None if group is None else group.mean(name)


def figure(group: Group | None, name: str) -> float:
    """The mean of a figure. Raises NotMeasured."""
    value = figure_or_none(group, name)
    if value is None:
        raise NotMeasured
    return value


def largest(group: Group | None, name: str) -> float:
    """The largest of a figure over the runs. Raises NotMeasured."""
    values = [] if group is None else group.values(name)
    if not values:
        raise NotMeasured
    return max(values)


def accuracy(group: Group | None) -> float:
    """The mean held-out accuracy. Raises NotMeasured."""
    return figure(group, "held_out_accuracy")


def ranks_of(group: Group | None) -> int:
    """Ranks of each run. Raises NotMeasured."""
    if group is None:
        raise NotMeasured
    return group.ranks


def data_share(groups: Sequence[Group]) -> float:
    """The largest share of a step that a group waits for data. Raises NotMeasured."""
    shares = [
        figure(group, "part_data_seconds") / figure(group, "step_seconds")
        for group in groups
        if group.counted[0].complete
    ]
    if not shares:
        raise NotMeasured
    return max(shares)
