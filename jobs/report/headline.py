"""Compares Ok-Topk with a dense allreduce in four figures, for the top of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jobs.render.style import OURS
from jobs.report.groups import Group

_DISTURBED = 1.25  # times as long


class SlowLinks(NamedTuple):
    """Runs of both methods between hosts on slow links.

    Attributes:
        paths: their run files; empty: there are none.
        problem: why there are none.
        rate: of each link, in each direction, with its unit.
    """

    paths: Sequence[Path] = ()
    problem: str = "no run over such links"
    rate: str = "1 Gb/s"


class Figure(NamedTuple):
    """One figure of the headline: `short` is a part of a sentence, `text` names what it is taken from."""

    short: str
    text: str


def headline(groups: Sequence[Group], slow: Sequence[Group], links: SlowLinks) -> list[Figure]:
    """The headline; figures that the runs do not have are left out, all of them where one of both methods is missing.

    Args:
        groups: of the runs compared, on links where words are nearly free.
        slow: of the runs over slow links; one that is not complete is no measurement.
        links: what these are, or why there are none.
    """
    if (here := _pair(groups)) is None:
        return []
    place = "Here all ranks share one host's memory, where words are nearly free."
    figures = [_words(*here), _accuracy(*here), _step(*here, "here", place)]
    if there := _complete_pair(slow):
        run = there[1].counted[0]
        place = f"{run.info.ranks} ranks in network namespaces, TCP over links shaped to {links.rate}, "
        place += f"{len(run.warm(run.step_seconds))} steps."
        figures.append(_step(*there, f"at {links.rate}", place))
    return [figure for figure in figures if figure is not None]


def sentence(figures: Sequence[Figure]) -> str:
    """The headline for a terminal."""
    return "; ".join(figure.short for figure in figures)


def notes(
    figures: Sequence[Figure], links: SlowLinks, groups: Sequence[Group], slow: Sequence[Group] = ()
) -> list[str]:
    """Notes: why there is no step over slow links, whether the machine was busy."""
    if not figures:
        return []
    lines = []
    if _complete_pair(slow) is None:
        lines.append(f"A step at {links.rate} was not measured: {links.problem}.")
    return lines + _disturbed([group for of in (groups, slow) for group in _pair(of) or ()])


def _disturbed(groups: Sequence[Group]) -> list[str]:
    """A note where equal work took much longer in some runs: step times then say little."""
    times = [
        sum(group.mean(f"{phase}_seconds") or 0.0 for phase in ("forward", "backward")) for group in groups
    ]
    least, most = min(filter(None, times), default=0.0), max(times)
    if most <= _DISTURBED * least:
        return []
    return [
        f"The forward and backward passes are the same work in all runs, but took between {_ms(least)} and {_ms(most)}: other "
        "programs used this machine. Steps that these differ in are not compared. Run it again on an idle machine."
    ]


def xi_sentence(groups: Sequence[Group]) -> str:
    """Where ξ of Ok-Topk was below P, and what it was divided by where it was not; "" where it was not measured."""
    group = _method(groups, OURS)
    if group is None:
        return ""
    xi, norms = (
        np.concatenate([run.measures[name] for run in group.counted]) for name in ("xi", "gradient_norm")
    )
    finite = np.isfinite(xi)
    above = finite & (xi >= group.ranks)
    if not finite.any():
        return ""
    if not above.any():
        return f"ξ is below P = {group.ranks} in all {finite.sum()} measured steps."
    line = f"ξ is not below P = {group.ranks} in {above.sum()} of {finite.sum()} measured steps."
    below = finite & ~above
    if below.any() and norms[above].mean() < norms[below].mean():
        line += (
            f" ξ divides by the norm of the mean gradient, which is {norms[above].mean():.2g} in these steps on average "
            f"and {norms[below].mean():.2g} in the others."
        )
    return line


def _method(groups: Sequence[Group], method: str) -> Group | None:
    return next((group for group in groups if group.method == method), None)


def _pair(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    """The groups of Ok-Topk and of Dense; None where one is missing."""
    ours, dense = _method(groups, OURS), _method(groups, "dense")
    return (ours, dense) if ours and dense else None


def _complete_pair(groups: Sequence[Group]) -> tuple[Group, Group] | None:
    """As `_pair`; None where one has no complete run, too."""
    pair = _pair(groups)
    return pair if pair and all(group.counted[0].complete for group in pair) else None


def _both(ours: Group, dense: Group, figure: str) -> tuple[float, float] | None:
    own, dense_own = ours.mean(figure), dense.mean(figure)
    return (own, dense_own) if own and dense_own else None


def _words(ours: Group, dense: Group) -> Figure | None:
    if (both := _both(ours, dense, "words")) is None:
        return None
    own, others = both
    short = (
        f"{_times(others / own)} times fewer words"
        if own < others
        else f"{_times(own / others)} times more words"
    )
    text = f"A rank sends {own:,.0f} words in a step, with the dense allreduce {others:,.0f}. Mean over all steps."
    return Figure(short, text)


def _accuracy(ours: Group, dense: Group) -> Figure | None:
    own, theirs = ours.mean("held_out_accuracy"), dense.mean("held_out_accuracy")
    if own is None or theirs is None:
        return None
    samples = int(dense.counted[0].evaluations["samples"][-1])
    points, images = 100.0 * (own - theirs), abs(own - theirs) * samples
    short = f"accuracy {abs(points):.2g} points {'higher' if points > 0 else 'lower'}"
    # an exact difference is a multiple of half an image with two seeds; this is rounding
    if images < 1e-6:
        short = "the same accuracy"
    seeds = min(len(ours.counted), len(dense.counted))
    text = (
        f"{own:.1%} of the held-out images at the end, with the dense allreduce {theirs:.1%}: "
        f"{images:.3g} of {samples:,} images"
    )
    if seeds == 1:
        return Figure(short, f"{text}. One seed: how far seeds differ is not known.")
    rates = [group.values("held_out_accuracy") for group in (ours, dense)]
    apart = 100 * max(max(values) - min(values) for values in rates)
    return Figure(
        short, f"{text}, means of {seeds} seeds. Seeds of one method are up to {apart:.2g} points apart."
    )


def _step(ours: Group, dense: Group, where: str, place: str) -> Figure | None:
    """How much longer a step is; no gain and no loss where the same work took another time, too."""
    if (both := _both(ours, dense, "step_seconds")) is None:
        return None
    own, others = (_ms(seconds) for seconds in both)
    alone = [_ms(group.mean("reduction_seconds") or 0.0) for group in (ours, dense)]
    text = f"{own}, with the dense allreduce {others}; the reduction alone {alone[0]} and {alone[1]}. {place}"
    compared = not _disturbed([ours, dense])
    return Figure(f"a step {_longer(*both)} {where}" if compared else f"steps {where} not compared", text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def _longer(own: float, theirs: float) -> str:
    """Compares two times: in percent up to one half more, else in multiples."""
    longer = own > theirs
    ratio = own / theirs if longer else theirs / own
    word = "longer" if longer else "shorter"
    share = 100.0 * abs(own / theirs - 1.0)
    if ratio < 1.5:
        return f"{share:.0f} % {word}" if share >= 0.5 else "equally long"
    return f"{_times(ratio)} times {word}"
