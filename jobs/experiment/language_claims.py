"""Claims of the experiments on text: held-out losses, and times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from data import DataError
from data.text.file import open_text_file
from data.text.frequencies import frequency_loss
from data.text.masking import TextEvaluationLoader
from jobs.experiment.claims import claim, figure, on_ranks, only, step_claim, volume_claims
from jobs.experiment.model import Experiment
from jobs.render.style import title_of
from jobs.report.groups import Group, by_batch, timed_by_stage
from jobs.report.page import Claim
from jobs.report.summary import ON_THE_DEVICE

LOSS_MARGIN = 0.01  # of dense's loss, that a sparse method may lose
LEARNT = 0.5  # nats below what word frequencies give
FASTER = 2.0  # than NCCL's flat allreduce, in training
BEFORE_EXCHANGE = ("step", "select")  # stages, where they were timed on the device


def language_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """The claims on loss, volume and time; those on time for each size of batches that speeds were compared at."""
    dense, oktopk = only(groups, "dense"), only(groups, "oktopk")
    dense_loss, by_frequency = figure(dense, "held_out_loss"), _frequency_loss(dense)
    learnt = f"dense's held-out loss is {LEARNT} nats or more below that of word frequencies alone"
    claims = [
        # before that, all methods look alike
        claim(learnt, dense_loss <= by_frequency - LEARNT, "{:.4f} and {:.4f}", dense_loss, by_frequency),
        _close("Ok-Topk", oktopk, dense),
        *(_sooner(oktopk, only(groups, method), method) for method in ("dense", "dense-ovlp")),
        *volume_claims(groups),
    ]
    for batch, alike in (by_batch(fast) or {0: []}).items():
        where = f", batches of {batch}" if batch else ""
        claims += [*_reduction_claims(alike, where), step_claim(alike, where)]
    return claims


def next_token_claims(experiment: Experiment, groups: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """The claims on the loss of each way to reduce, and on Ok-Topk's volume and step."""
    dense = only(groups, "dense")
    reduced = [group for group in groups if group.method != "dense" and group.counted[0].complete]
    closes = [_close(group.label, group, dense) for group in reduced]
    return [*closes, *volume_claims(groups), step_claim(fast)]


def _close(name: str, group: Group | None, dense: Group | None) -> Claim:
    loss, dense_loss = (figure(each, "held_out_loss") for each in (group, dense))
    text = f"{name}'s held-out loss is at most {LOSS_MARGIN:.0%} above dense's after as many steps, means over the seeds"
    near, above = loss <= (1 + LOSS_MARGIN) * dense_loss, loss / dense_loss - 1
    return claim(text, near, "{:+.2%}: {:.4f} and {:.4f}", above, loss, dense_loss)


def _frequency_loss(group: Group | None) -> float:
    """Loss by word frequencies of the group's held-out words; NaN where the text is gone."""
    data = {} if group is None else group.runs[0].config.get("data", {})
    try:
        training, held_out = open_text_file(data.get("path", ""))
    except DataError:
        return math.nan
    loader = TextEvaluationLoader(
        held_out, batch_size=512, rank=0, size=1, most=data.get("eval_sequences", 0)
    )
    return frequency_loss(training, loader)


def _sooner(oktopk: Group | None, dense: Group | None, method: str) -> Claim:
    seconds = min(figure(group, "training_seconds") for group in (oktopk, dense))
    losses = [_loss_after(group, seconds) for group in (oktopk, dense)]
    text = f"Ok-Topk's held-out loss is below {title_of(method)}'s in equal time: when the faster of the two has ended, the "
    text += "other one being as far in its schedule as it got"
    return claim(
        text, losses[0] < losses[1], "after {:.1f} s of training {:.4f} and {:.4f}", seconds, *losses
    )


def _loss_after(group: Group | None, seconds: float) -> float:
    """The held-out loss after some training time, on a straight line between two evaluations; mean over the runs."""
    runs = () if group is None else group.counted
    if not runs or not all(len(run.evaluations["step"]) for run in runs):
        return math.nan
    losses = []
    for run in runs:
        times = run.at_steps(run.training_seconds, run.evaluations["step"])
        losses.append(np.interp(seconds, times, run.evaluations["loss"]))
    return float(np.mean(losses))


def _reduction_claims(fast: Sequence[Group], where: str) -> list[Claim]:
    """Whole reductions, with what Ok-Topk selects and NCCL converts, against each other; and what follows a selection."""
    widest = on_ranks(fast, max((group.ranks for group in fast), default=0))
    oktopk, nccl = only(widest, "oktopk"), only(widest, "nccl")
    kind = "" if nccl is None else nccl.runs[0].config["reduction"].get("gradient_type") or "float32"
    of_kind = f"NCCL's flat allreduce{f' of {kind}' if kind else ''}{where}"
    flat = figure(nccl, "reduction_seconds")

    def faster(what: str, taken: float) -> Claim:
        text = f"in training {what} at least {FASTER:.0f} times faster than {of_kind}"
        holds, form = flat >= FASTER * taken, "{:.2f} times: {:.2f} and {:.2f} ms"
        return claim(text, holds, form, flat / taken, 1e3 * taken, 1e3 * flat)

    after = "what follows Ok-Topk's selection (exchange, sums, gathering, applying), timed stage by stage, is"
    return [
        faster("Ok-Topk's reduction, selection included, is", figure(oktopk, "reduction_seconds")),
        faster(after, _behind_selection(widest)),
    ]


def _behind_selection(groups: Sequence[Group]) -> float:
    """Seconds of the steps whose stages were timed on the device, mean over them; NaN where there are none."""
    seconds: list[float] = []
    staged = [group for group in groups if group.method == "oktopk" and timed_by_stage(group)]
    for run in (run for group in staged for run in group.counted):
        if run.complete and ON_THE_DEVICE in run.stages:
            after = [values for name, values in run.stages.items() if name not in BEFORE_EXCHANGE]
            on_device = run.warm(run.stages[ON_THE_DEVICE]) > 0
            seconds += run.warm(np.sum(after, axis=0))[on_device].tolist()
    return float(np.mean(seconds)) if seconds else math.nan
