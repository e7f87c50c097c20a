"""The paper's methods and weak scaling, replayed: prints the tables of replayed.md.

    python -m docs.results.replayed
    python -m docs.results.replayed --scale --picture docs/results/replayed.svg
    python -m docs.results.replayed --few

`--scale` takes some minutes, `--few` half a minute.
"""

import argparse
import functools
from itertools import product
from pathlib import Path
from typing import NamedTuple

from collectives.grid import rows_of_grid
from jobs.render.chart import title_of
from oktopk.plan.picture import Curve, draw
from oktopk.replay.links import DEVICES
from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels, predict, ring_seconds
from oktopk.replay.recording import Step
from oktopk.settings import Settings


class Workload(NamedTuple):
    """One of the paper's: gradient, ranks, and Ok-Topk's gain over the fastest and the slowest sparse baseline.

    `arithmetic`: least floating-point operations of a rank's step; None where they are not known here.
    """

    length: int
    ranks: int
    density: float
    gains: tuple[float, float]
    arithmetic: float | None


WORKLOADS = {
    # operations: 6 for each multiplication of the forward pass. VGG-16: 313.2 M of an image, batch 16
    "VGG-16": Workload(14_728_266, 32, 0.02, (1.51, 8.83), 6 * 313.2e6 * 16),
    "LSTM": Workload(27_569_568, 64, 0.02, (1.34, 7.71), None),
    # the encoder's matrices alone, 8 sequences of 128
    "BERT": Workload(133_547_324, 256, 0.01, (3.29, 12.95), 6 * 84.9e6 * 8 * 128),
}
BASELINES = ("topka", "topkdsa", "gtopk", "gaussiank")
METHODS = ("dense", *BASELINES, "oktopk")
DENSE_GAIN, DENSE_RANKS = 3.2, 32  # over dense, BERT
EFFICIENCY = 0.763  # BERT at 256 ranks
PEAK = 9.3e12  # operations a second of a P100 for PCIe, float32

ARIES = Level.of_rate(10e9, latency=1.5e-6)
NO_KERNELS = Kernels({}, "kernels take no time")

RATES = (10, 100, 400)  # Gb/s
WAYS = ("direct", "grid")
LATENCY = 5e-6
RANKS = (16, 64, 256, 1024, 4096)
PRIME = 1021  # ranks of a grid whose columns differ
FEW = 4, 16  # ranks: from a grid's least on
LENGTHS = (1_000_000, 14_728_266, 133_547_324, 1_300_000_000)
DENSITIES = (0.01, 0.02)
FEW_RATES, LATENCIES = (1, 10, 25, 100, 400), (1.5e-6, 20e-6, 200e-6)  # Gb/s, s
COMPUTE = 0.1  # seconds of a step without communication, of efficiencies


@functools.cache
def found(name, method, ranks=None):
    """What a step of a workload is predicted to be on the paper's network."""
    length, of_paper, density, *_ = WORKLOADS[name]
    step = Step(method, length, ranks or of_paper, 1, Settings(density=density, wire="plain"))
    return predict(step, Network(ARIES, ARIES), NO_KERNELS)


def rows(heads, cells):
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells))


def ms(seconds):
    """Milliseconds, with three digits or more."""
    value = 1e3 * seconds
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def methods_table():
    """Words, milliseconds and times Ok-Topk's of every method."""
    heads = ["Mwords, ms, of Ok-Topk's", *(f"{name}, {each.ranks} ranks" for name, each in WORKLOADS.items())]
    cells = []
    for method in METHODS:
        row = [title_of(method)]
        for name in WORKLOADS:
            one, ours = found(name, method), found(name, "oktopk")
            row.append(f"{one.rank_bytes / 4e6:.1f}, {ms(one.seconds)}, {one.seconds / ours.seconds:.1f}")
        cells.append(row)
    return rows(heads, cells)


def claim(title, gain, slow, ours, arithmetic):
    """A row: a gain of the paper, the replay's without computation, and up to how much it has the paper's."""
    most = max(0.0, (slow - gain * ours) / (gain - 1))
    least = None if arithmetic is None else arithmetic / PEAK
    held = "not decided" if least is None else "no" if most < least else "not refuted"
    return [title, f"{gain:g}", f"{slow / ours:.1f}", ms(most), "-" if least is None else ms(least), held]


def claims_table():
    """The paper's figures beside the replay's."""
    heads = ["Ok-Topk's gain", "the paper", "replay, no computation", "computation at most, ms"]
    cells = []
    for name, each in WORKLOADS.items():
        times = sorted(found(name, method).seconds for method in BASELINES)
        ours = found(name, "oktopk").seconds
        for gain, slow, which in zip(each.gains, (times[0], times[-1]), ("fastest", "slowest"), strict=True):
            cells.append(claim(f"{name}, over the {which} baseline", gain, slow, ours, each.arithmetic))
    slow, ours = (found("BERT", method, DENSE_RANKS).seconds for method in ("dense", "oktopk"))
    title = f"BERT, over dense, {DENSE_RANKS} ranks"
    cells.append(claim(title, DENSE_GAIN, slow, ours, WORKLOADS["BERT"].arithmetic))
    return rows([*heads, "arithmetic at least, ms", "reproduced"], cells)


def efficiency():
    """Of BERT, its time on 32 ranks over that on 256, without computation: the least."""
    return found("BERT", "oktopk", DENSE_RANKS).seconds / found("BERT", "oktopk").seconds


def cluster(gigabits, latency=LATENCY):
    """Hosts with links of a rate."""
    link = Level.of_rate(gigabits * 125e6, latency)
    return Network(link, link)


@functools.cache
def step_of(method, gigabits, ranks, exchange="direct", times=1):
    """What a step of BERT's length, or of so many times that, is predicted to be at a rate."""
    settings = Settings(density=WORKLOADS["BERT"].density, exchange=exchange)
    length = times * WORKLOADS["BERT"].length
    return predict(Step(method, length, ranks, 1, settings), cluster(gigabits), NO_KERNELS)


@functools.cache
def scaled(gigabits, ranks):
    """Seconds of Ok-Topk, TopkA and dense at a rate, and of Ok-Topk's for messages at their ends."""
    ours, topka = (step_of(method, gigabits, ranks) for method in ("oktopk", "topka"))
    dense = ring_seconds(cluster(gigabits), ranks, 2 * WORKLOADS["BERT"].length)
    return ours.seconds, topka.seconds, dense, ours.overhead


def grid_row(ranks):
    """Cells of a number of ranks: messages, megabytes, and milliseconds of both exchanges."""
    high = rows_of_grid(ranks)
    cells = [f"{ranks:,}", f"{ranks - 1:,}, {high + ranks // high - 2}"]
    for rate in RATES:
        both = [step_of("oktopk", rate, ranks, exchange) for exchange in WAYS]
        if rate == RATES[0]:
            cells.append(", ".join(f"{each.rank_bytes / 1e6:.1f}" for each in both))
        direct, grid = (each.seconds for each in both)
        cells.append(f"{ms(direct)}, {ms(grid)}, {direct / grid:.2f}")
    return cells


def prime_line():
    """What the page says of a grid whose columns differ."""
    direct, grid = (step_of("oktopk", 100, PRIME, exchange).seconds for exchange in WAYS)
    took = f"At 100 Gb/s they take {ms(direct)} ms directly and {ms(grid)} ms over the grid"
    return f"{PRIME:,} ranks make columns of 31 and 32. {took}, {direct / grid:.2f} times as fast."


def long_line():
    """What the page says of a longer gradient."""
    direct, grid = (step_of("oktopk", 10, RANKS[-1], exchange, 10).seconds for exchange in WAYS)
    return f"With ten times the elements and 10 Gb/s it is {direct / grid:.2f} times as fast there."


def grid_table(ranks=RANKS):
    """Both exchanges over ranks and rates."""
    return rows(["ranks", "messages", "MB", *(f"{rate} Gb/s" for rate in RATES)], map(grid_row, ranks))


def gains_of_grid(ranks):
    """How many times as fast as a direct exchange a grid of so many ranks is, over lengths, densities, links and kernels."""
    gains = []
    for length, density in product(LENGTHS, DENSITIES):
        steps = [Step("oktopk", length, ranks, 1, Settings(density=density, exchange=way)) for way in WAYS]
        for rate, latency, kernels in product(FEW_RATES, LATENCIES, (NO_KERNELS, DEVICES["cuda"])):
            direct, grid = (predict(step, cluster(rate, latency), kernels).seconds for step in steps)
            gains.append(direct / grid)
    return gains


def few_lines():
    """What the page says of few ranks."""
    least, most = FEW
    gains = [gain for ranks in range(least, most) for gain in gains_of_grid(ranks)]
    faster, at_most = sum(gain > 1 for gain in gains), max(gains_of_grid(most))
    below = f"Of {len(gains):,} comparisons of {least} to {most - 1} ranks the grid is the faster one in {faster:,}"
    return f"{below}, at most {max(gains):.2f} times as fast; on {most} ranks {at_most:.2f} times."


def scale_row(ranks):
    """Cells of a number of ranks."""
    times = [scaled(rate, ranks) for rate in RATES]
    return [f"{ranks:,}", ms(times[0][3]), *(", ".join(map(ms, each[:3])) for each in times)]


def scale_table(ranks=RANKS):
    """Milliseconds of an exchange over ranks and rates."""
    heads = ["ranks", "messages at their ends", *(f"{rate} Gb/s" for rate in RATES)]
    return rows(heads, map(scale_row, ranks))


def efficiency_table(ranks=RANKS[-1]):
    """Share of a step that is computation, of each method."""
    heads = [f"{ranks:,} ranks", *(f"{rate} Gb/s" for rate in RATES)]
    cells = []
    for number, method in enumerate(("Ok-Topk", "TopkA", "dense")):
        shares = (COMPUTE / (COMPUTE + scaled(rate, ranks)[number]) for rate in RATES)
        cells.append([method, *(f"{100 * share:.1f} %" for share in shares)])
    return rows(heads, cells)


def curves(ranks=RANKS):
    """Lines of the picture."""
    made = []
    for number, (method, dashed) in enumerate((("Ok-Topk", False), ("TopkA", False), ("dense", True))):
        for rate in RATES if method != "TopkA" else (100,):
            times = [scaled(rate, each)[number] for each in ranks]
            made.append(Curve(f"{method}, {rate} Gb/s", ranks, times, dashed))
    return made


def main(arguments=None):
    """The command."""
    parser = argparse.ArgumentParser(prog="docs.results.replayed", description="Replay the paper's claims.")
    parser.add_argument("--scale", action="store_true", help="Replay up to 4,096 ranks, too")
    parser.add_argument("--few", action="store_true", help="Compare exchanges of few ranks, and nothing else")
    parser.add_argument("--picture", type=Path, help="Draw the scaling, SVG or PNG")
    options = parser.parse_args(arguments)
    if options.few:
        print(few_lines())
        return
    parts = [methods_table(), claims_table(), f"efficiency: {100 * efficiency():.1f} %"]
    if options.scale:
        parts += [scale_table(), efficiency_table(), grid_table(), prime_line(), long_line()]
    print("\n\n".join(parts))
    if options.picture is not None:
        title = "exchange of a step, n = 133.5 M, density 1 %, one rank a host"
        draw(curves(), title, options.picture)


if __name__ == "__main__":
    main()
