"""What Ok-Topk is to show beside dense where a language is learnt: losses of held-out masked words, and time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data import DataError
from data.text.file import open_text_file
from data.text.frequencies import frequency_loss
from data.text.masking import TextEvaluationLoader
from jobs.experiment.claims import NotMeasured, claim, figure, only, step_claim, volume_claims
from jobs.experiment.model import Experiment
from jobs.report.groups import Group, by_batch, timed_by_stage
from jobs.report.page import Claim
from jobs.report.style import title_of
from jobs.report.summary import ON_THE_DEVICE, Run

LOSS_MARGIN = 0.01  # of dense's loss, that a sparse method may lose
LEARNT = 0.5  # nats below what word frequencies give
FASTER = 2.0  # than NCCL's flat allreduce, in training
BEFORE_EXCHANGE = ("step", "select")  # stages, where they were timed on the device


def language_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """The claims on loss, volume and time; those on time for each size of batches that speeds were compared at."""
    dense, oktopk = only(groups, "dense"), only(groups, "oktopk")
    claims = [
        _learnt(dense),
        claim(
            f"Ok-Topk's held-out loss is at most {LOSS_MARGIN:.0%} above dense's after as many steps, means over the seeds",
            lambda: (
                (
                    figure(oktopk, "held_out_loss") / figure(dense, "held_out_loss") - 1,
                    figure(oktopk, "held_out_loss"),
                    figure(dense, "held_out_loss"),
                ),
                figure(oktopk, "held_out_loss") <= (1 + LOSS_MARGIN) * figure(dense, "held_out_loss"),
            ),
            "{:+.2%}: {:.4f} and {:.4f}",
        ),
        *(_sooner(oktopk, only(groups, method), method) for method in ("dense", "dense-ovlp")),
        *volume_claims(groups),
    ]
    for batch, alike in (by_batch(fast) or {0: []}).items():
        where = f", batches of {batch}" if batch else ""
        claims += [*_reduction_claims(alike, where), step_claim(alike, where)]
    return claims


def _learnt(dense: Group | None) -> Claim:
    """Before that, all methods look alike."""

    def measure() -> tuple[tuple[float, ...], bool]:
        loss = figure(dense, "held_out_loss")
        known = _frequency_loss(dense)
        return (loss, known), loss <= known - LEARNT

    return claim(
        f"dense's held-out loss is {LEARNT} nats or more below that of word frequencies alone",
        measure,
        "{:.4f} and {:.4f}",
    )


def _frequency_loss(group: Group | None) -> float:
    """Of the held-out words that the group was scored by. Raises NotMeasured: the text is no longer there."""
    data = {} if group is None else group.runs[0].config.get("data", {})
    try:
        training, held_out = open_text_file(data.get("path", ""))
    except DataError as error:
        raise NotMeasured from error
    loader = TextEvaluationLoader(
        held_out, batch_size=512, rank=0, size=1, most=data.get("eval_sequences", 0)
    )
    return frequency_loss(training, loader)


def _sooner(oktopk: Group | None, dense: Group | None, method: str) -> Claim:
    def measure() -> tuple[tuple[float, ...], bool]:
        if oktopk is None or dense is None:
            raise NotMeasured
        seconds = min(_ended(oktopk), _ended(dense))
        sparse_loss, dense_loss = _loss_after(oktopk, seconds), _loss_after(dense, seconds)
        return (seconds, sparse_loss, dense_loss), sparse_loss < dense_loss

    return claim(
        f"Ok-Topk's held-out loss is below {title_of(method)}'s in equal time: when the faster of the two has ended, the "
        "other one being as far in its schedule as it got",
        measure,
        "after {:.1f} s of training {:.4f} and {:.4f}",
    )


def _ended(group: Group) -> float:
    return figure(group, "training_seconds")


def _loss_after(group: Group, seconds: float) -> float:
    """The held-out loss after some training time, on a straight line between two evaluations; mean over the runs."""
    return float(np.mean([np.interp(seconds, *_losses(run)) for run in group.counted]))


def _losses(run: Run) -> tuple[np.ndarray, np.ndarray]:
    if not len(run.evaluations["step"]):
        raise NotMeasured
    return run.at_steps(run.training_seconds, run.evaluations["step"]), run.evaluations["loss"]


def _reduction_claims(fast: Sequence[Group], where: str) -> list[Claim]:
    """Whole reductions, with what Ok-Topk selects and NCCL converts, against each other; and what follows a selection."""
    size = max((group.ranks for group in fast), default=0)
    widest = [group for group in fast if group.ranks == size]
    oktopk, nccl = only(widest, "oktopk"), only(widest, "nccl")
    kind = "" if nccl is None else nccl.runs[0].config["reduction"].get("gradient_type") or "float32"
    of_kind = f"NCCL's flat allreduce{f' of {kind}' if kind else ''}{where}"

    def compared(taken: float) -> tuple[tuple[float, ...], bool]:
        flat = figure(nccl, "reduction_seconds")
        return (flat / taken, 1e3 * taken, 1e3 * flat), flat >= FASTER * taken

    return [
        claim(
            f"in training Ok-Topk's reduction, selection included, is at least {FASTER:.0f} times faster than {of_kind}",
            lambda: compared(figure(oktopk, "reduction_seconds")),
            "{:.2f} times: {:.2f} and {:.2f} ms",
        ),
        claim(
            "in training what follows Ok-Topk's selection (exchange, sums, gathering, applying), timed stage by stage, "
            f"is at least {FASTER:.0f} times faster than {of_kind}",
            lambda: compared(_behind_selection(widest)),
            "{:.2f} times: {:.2f} and {:.2f} ms",
        ),
    ]


def _behind_selection(groups: Sequence[Group]) -> float:
    """Seconds of the steps whose stages were timed on the device, mean over them. Raises NotMeasured."""
    found: list[float] = []
    for group in groups:
        if group.method != "oktopk" or not timed_by_stage(group):
            continue
        for run in group.counted:
            if run.complete and ON_THE_DEVICE in run.stages:
                behind = np.sum(
                    [run.stages[name] for name in run.stages if name not in BEFORE_EXCHANGE], axis=0
                )
                found += run.warm(behind)[run.warm(run.stages[ON_THE_DEVICE]) > 0].tolist()
    if not found:
        raise NotMeasured
    return float(np.mean(found))
