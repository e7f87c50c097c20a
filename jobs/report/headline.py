"""Compares Ok-Topk with a dense allreduce in four figures, for the top of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.render.style import OURS
from jobs.report.groups import Group

GIGABIT = 1e9
_BITS = 32  # of a word
_DISTURBED = 1.25  # times as long


@dataclass(frozen=True)
class SlowLinks:
    """Runs of both methods between hosts on slow links.

    Attributes:
        paths: their run files; empty: there are none, and their step times are projected.
        problem: why there are none.
        bits_per_second: of each link, in each direction.
    """

    paths: Sequence[Path] = ()
    problem: str = ""
    bits_per_second: float = GIGABIT

    @property
    def rate(self) -> str:
        return f"{self.bits_per_second / GIGABIT:g} Gb/s"


@dataclass(frozen=True)
class Figure:
    """One figure of the headline: `short` is a part of a sentence, `text` says what it is taken from.

    projected: it was not measured.
    """

    short: str
    text: str
    projected: bool = False


def headline(groups: Sequence[Group], slow: Sequence[Group], links: SlowLinks) -> list[Figure]:
    """The headline; figures that the runs do not have are left out, all of them where one of both methods is missing.

    Args:
        groups: of the runs compared, on links where words are nearly free.
        slow: of the runs over slow links, if there are any.
        links: what these are, or why there are none.
    """
    ours, dense = _method(groups, OURS), _method(groups, "dense")
    if ours is None or dense is None:
        return []
    figures = [_words(ours, dense), _accuracy(ours, dense), _step(ours, dense)]
    figures.append(
        _over_links(_method(slow, OURS), _method(slow, "dense"), links) or _projected(ours, dense, links)
    )
    return [figure for figure in figures if figure is not None]


def sentence(figures: Sequence[Figure]) -> str:
    """The headline for a terminal."""
    return "; ".join(figure.short + (" (projection)" if figure.projected else "") for figure in figures)


def notes(
    figures: Sequence[Figure], links: SlowLinks, groups: Sequence[Group], slow: Sequence[Group] = ()
) -> list[str]:
    """Notes: why a figure is projected, whether the machine was busy."""
    lines = []
    if any(figure.projected for figure in figures):
        why = links.problem or "no run over such links"
        lines.append(f"The step at {links.rate} is a projection. It was not measured: {why}.")
    if figures:
        compared = [_method(of, method) for of in (groups, slow) for method in (OURS, "dense")]
        lines += _disturbed([group for group in compared if group is not None])
    return lines


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


def _both(ours: Group, dense: Group, figure: str) -> tuple[float, float] | None:
    own, theirs = ours.mean(figure), dense.mean(figure)
    return (own, theirs) if own and theirs else None


def _words(ours: Group, dense: Group) -> Figure | None:
    if (both := _both(ours, dense, "words")) is None:
        return None
    own, theirs = both
    short = (
        f"{_times(theirs / own)} times fewer words"
        if own < theirs
        else f"{_times(own / theirs)} times more words"
    )
    text = f"A rank sends {own:,.0f} words in a step, with the dense allreduce {theirs:,.0f}. Mean over all steps."
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


def _step(ours: Group, dense: Group) -> Figure | None:
    if (both := _both(ours, dense, "step_seconds")) is None:
        return None
    alone = [_ms(group.mean("reduction_seconds") or 0.0) for group in (ours, dense)]
    text = f"{_beside(*both)}; the reduction alone {alone[0]} and {alone[1]}. "
    text += "Here all ranks share one host's memory, where words are nearly free."
    return Figure(_compared(ours, dense, both, "here"), text)


def _over_links(ours: Group | None, dense: Group | None, links: SlowLinks) -> Figure | None:
    if ours is None or dense is None or not (ours.counted[0].complete and dense.counted[0].complete):
        return None
    step, reduction = (_both(ours, dense, f"{what}_seconds") for what in ("step", "reduction"))
    if step is None or reduction is None:
        return None
    run = dense.counted[0]
    return Figure(
        _compared(ours, dense, step, f"at {links.rate}"),
        f"Measured: {_beside(*step)}; the reduction alone {_ms(reduction[0])} and {_ms(reduction[1])}. {ours.ranks} ranks in "
        f"network namespaces, TCP over links shaped to {links.rate}, {len(run.warm(run.step_seconds))} steps.",
    )


def _projected(ours: Group, dense: Group, links: SlowLinks) -> Figure | None:
    own, theirs = _seconds_over(ours, links), _seconds_over(dense, links)
    if own is None or theirs is None:
        return None
    text = f"{_beside(own, theirs)}: a step as measured here, plus the time that the words of the busiest rank take at "
    text += f"{links.rate}. Latency is left out."
    return Figure(f"a step {_longer(own, theirs)} at {links.rate}", text, projected=True)


def _seconds_over(group: Group, links: SlowLinks) -> float | None:
    step, words, control = (group.mean(name) for name in ("step_seconds", "words_busiest", "control_words"))
    if step is None or words is None:
        return None
    return step + (words + (control or 0.0)) * _BITS / links.bits_per_second


def _compared(ours: Group, dense: Group, steps: tuple[float, float], where: str) -> str:
    """How much longer a step is; no gain and no loss where the same work took another time, too."""
    if _disturbed([ours, dense]):
        return f"steps {where} not compared"
    return f"a step {_longer(*steps)} {where}"


def _beside(own: float, theirs: float) -> str:
    return f"{_ms(own)}, with the dense allreduce {_ms(theirs)}"


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
