"""Everything that can be set about a gradient allreduce, validated once."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from collectives.codec import WIRES

DENSE_ABOVE = 0.25
"""A density above this runs the dense path: COO entries cost twice their value, in both phases."""

DEFAULT_BUCKET_MB = 25.0
"""Size of a bucket where gradients are reduced behind the backward pass, on CPUs and by other libraries, in 1e6 bytes."""

SELECTION_CAP = 1.25
"""No selection, local or global, exceeds this times k."""

Wire = Literal["auto", "plain", "float32", "bfloat16", "int8", "int4"]

Exchange = Literal["auto", "direct", "grid"]

MOST_TIMEOUT = 1e9
"""Seconds; kernels count 2^64 nanoseconds."""

LEAST_STAGES = 4
"""A density falls in at least so many stages, if it has as many steps to fall in."""


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced.

    Attributes:
        density: share of the entries that is applied per step, in (0, 1]; k = max(1, ceil(density * length)).
        threshold_interval: steps between exact thresholds (tau'), >= 1.
        boundary_interval: steps between new region boundaries (tau), >= 1, which come from what was selected before. In the first
            interval the 2nd, 3rd, 5th, 9th, ... sparse step renews them, too.
        dense_warmup_steps: first steps that reduce densely, >= 0.
        density_warmup_steps: steps after those in which the density falls to `density` by equal ratios,
            >= 0; a whole run, if you like. With updates and `every` a step is an exchange. It falls every
            `threshold_interval` steps, as a new k makes a step exact, or more often, so that it falls
            in four stages at least.
        first_density: density of the first of these steps, in (0, 0.25], at least `density`.
        nonfinite: what a NaN or Inf in a gradient leads to: "raise" an error on all ranks, or "skip" the step on all of them. A
            raise leaves the residual as before to rounding. A skip leaves it bit for bit, as every step copies it before it
            changes it: n words more memory and 8n bytes more memory traffic. A deferred step that is
            skipped has an update of zero; the optimizer has stepped on it before the ranks know, so its momentum moved. Its
            residual is exact again when the next step begins, or after `complete`.
        balance_trigger: even out the kept entries when one rank holds more than this times the mean, >= 1. No effect on union,
            whose blocks are equal.
        bucket_rounds: rounds of a batch, in flight at once, where entries or values go to the ranks that sum them, >= 1.
        drift_tolerance: between exact steps the global threshold moves when its count is off k by more than this share of k,
            in [0, 0.25].
        average: return the mean over the ranks, else the sum.
        deferred: return from a step of Ok-Topk through peer memory before the host knows its outcome, so that the GPU does
            not wait for the host; see `GradientAllreduce.step`. No effect on other steps.
        timeout: seconds that a rank may come late to construction or to a step, > 0; then the other ranks raise and name it. Over
            messages a rank under a debugger does not raise; give 1e9 where another rank is stopped in one.
        levels: whether the ranks of a host sum their gradients before anything travels between hosts. "flat": every rank
            exchanges with all others. "hosts": each rank of a host sums one shard, and Ok-Topk runs between hosts: k, its caps
            and its bounds are then those of a host. "auto": hosts where there are several with several ranks each, and the
            method is oktopk or union.
        ranks_per_host: ranks that count as one host, which must share memory; 0: those that do. With hosts of different
            numbers of ranks there are as many shards as the smallest has ranks; the others hold none.
        balanced_regions: regions of equal counts of selected entries, else of equal lengths; for comparison.
        rotate: in each round of split-and-reduce every rank sends to another one, else all send to the same; for comparison.
        wire: how entries of Ok-Topk and union travel; other methods send plain ones. "plain" is 8 bytes each; "float32" takes
            fewer bits for indices, as union does on every wire; "bfloat16", "int8" and "int4" round values, too, and the
            residual keeps what was rounded away. "auto" is plain where all ranks share a host, else float32. All but plain go
            over messages.
        exchange: how entries of Ok-Topk go to the ranks that sum them. "direct": to each by itself, in P - 1 messages a rank.
            "grid": over a grid of the ranks, in some 2·sqrt(P) messages of twice the words in all. It pays where messages take
            longer than bytes, from several hundred ranks on fast links. "auto" is direct, as no number of ranks alone decides;
            `settings="auto"` of `DistributedOptimizer` chooses by measured links. In two levels P is the number of hosts.
    """

    density: float = 0.01
    threshold_interval: int = 32
    boundary_interval: int = 64
    dense_warmup_steps: int = 0
    density_warmup_steps: int = 0
    first_density: float = DENSE_ABOVE
    nonfinite: Literal["raise", "skip"] = "raise"
    balance_trigger: float = 4.0
    bucket_rounds: int = 8
    drift_tolerance: float = 0.01
    average: bool = True
    deferred: bool = False
    timeout: float = 600.0
    levels: Literal["auto", "flat", "hosts"] = "auto"
    ranks_per_host: int = 0
    balanced_regions: bool = True
    rotate: bool = True
    wire: Literal["auto", "plain", "float32", "bfloat16", "int8", "int4"] = "auto"
    exchange: Literal["auto", "direct", "grid"] = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, plain(getattr(self, field.name))
            object.__setattr__(self, name, value)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            least = 0 if name.endswith("_steps") or name == "ranks_per_host" else 1
            if field.type == "float" and not number:
                raise ValueError(f"{name} {value!r} is not a number")
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{name} {value!r} is not True or False")
            if field.type == "int" and not (number and isinstance(value, int) and value >= least):
                raise ValueError(f"{name} {value!r} is not an integer >= {least}")
        if self.nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite {self.nonfinite!r} is not 'raise' or 'skip'")
        if self.levels not in ("auto", "flat", "hosts"):
            raise ValueError(f"levels {self.levels!r} is not 'auto', 'flat' or 'hosts'")
        if self.wire not in ("auto", *WIRES):
            raise ValueError(f"wire {self.wire!r} is not 'auto' or one of {', '.join(WIRES)}")
        if self.exchange not in ("auto", "direct", "grid"):
            raise ValueError(f"exchange {self.exchange!r} is not 'auto', 'direct' or 'grid'")
        for name, bound, valid in (
            ("density", "in (0, 1]", 0 < self.density <= 1),
            ("first_density", f"in (0, {DENSE_ABOVE}]", 0 < self.first_density <= DENSE_ABOVE),
            ("balance_trigger", ">= 1", self.balance_trigger >= 1),
            ("drift_tolerance", "in [0, 0.25]", 0 <= self.drift_tolerance <= 0.25),
            ("timeout", f"in (0, {MOST_TIMEOUT:.0e}]", 0 < self.timeout <= MOST_TIMEOUT),
        ):
            if not valid:
                raise ValueError(f"{name} {getattr(self, name)} is not {bound}")
        first, falls = self.first_density, self.density_warmup_steps
        if first != DENSE_ABOVE and not falls:
            raise ValueError(
                f"first_density {first} is for steps in which it falls: set density_warmup_steps"
            )
        if falls and first < min(self.density, DENSE_ABOVE):
            raise ValueError(f"first_density {first} is below density {self.density}: nothing would fall")

    def density_at(self, step: int) -> float:
        """Density of step `step`, counted from 0; 1.0 while the dense warm-up lasts."""
        if step < self.dense_warmup_steps:
            return 1.0
        into, falls = step - self.dense_warmup_steps, self.density_warmup_steps
        if into >= falls or self.density >= self.first_density:
            return self.density
        into -= into % _steps_of_a_stage(falls, self.threshold_interval)
        return float(self.first_density * (self.density / self.first_density) ** (into / falls))


def falling_density(
    mean: float, steps: int, *, fall: float = 10.0, threshold_interval: int = Settings.threshold_interval
) -> dict[str, Any]:
    """Settings of a density that falls over a run by equal ratios, and sends as much as `mean` throughout would.

    As in `DistributedOptimizer(adamw, wire="int4", **falling_density(0.0125, steps=3000))`. The gap to dense training opens early
    in a run, so that more bytes belong there. With 16 simulated workers a fall of 10 ended lower than none, one of 50 did not.

    Args:
        mean: density in the mean of these steps, > 0; the first one is at most 0.25.
        steps: those that exchange, behind dense_warmup_steps, >= 1: of updates one in `every`. Later ones have the last density.
        fall: the first density over the last one, > 1.
        threshold_interval: that of `Settings`, where you set another one.

    Returns:
        `density`, `first_density` and `density_warmup_steps` of `Settings`.

    Raises:
        ValueError: an argument is not valid.

    Traffic: that of `mean` in each step, in the mean, to rounding of k; coded indices take a little less.
    Source: own, docs/results/updates.md.
    """
    mean, steps, fall, interval = map(plain, (mean, steps, fall, threshold_interval))
    for name, value in (("steps", steps), ("threshold_interval", interval)):
        if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{name} {value!r} is not an integer >= 1")
    for name, value, above in (("mean", mean, 0), ("fall", fall, 1)):
        if not (isinstance(value, int | float) and above < value < math.inf):
            raise ValueError(f"{name} {value!r} is not a number > {above}")
    stage = _steps_of_a_stage(steps, interval)
    places = np.arange(0, steps, stage)
    lengths = np.minimum(stage, steps - places)
    first = float(mean * steps / (lengths * fall ** (-places / steps)).sum())
    if first > DENSE_ABOVE:
        raise ValueError(
            f"mean {mean} is too large: the first density would be {first:.3g}, above {DENSE_ABOVE}"
        )
    return {"density": first / fall, "first_density": first, "density_warmup_steps": steps}


def _steps_of_a_stage(falls: int, threshold_interval: int) -> int:
    """Steps of one density where it falls over so many."""
    return min(threshold_interval, max(1, falls // LEAST_STAGES))


def timeout_of(settings: Mapping[str, Any]) -> float:
    """The timeout among keywords of `Settings`; the default where it is missing, or not valid, which is refused later."""
    try:
        return Settings(timeout=settings.get("timeout", Settings.timeout)).timeout
    except ValueError:
        return Settings.timeout


def check_names(keywords: Iterable[str], taker: Callable[..., Any], *more: str) -> None:
    """Raise ValueError for a keyword that neither the taker nor `Settings` has, and name the nearest one.

    Args:
        keywords: of a call.
        taker: whose own parameters are known.
        more: keywords that are known too.
    """
    parameters = inspect.signature(taker).parameters.values()
    own = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    known = dict.fromkeys([*own, *more, *(field.name for field in fields(Settings))])
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{name}: unknown setting{hint}; valid: {', '.join(known)}")


def entries_kept(density: float, length: int) -> int:
    """k = max(1, ceil(density * length)), of the density as it is written: 0.07 of 100 is 7, though 0.07 * 100 > 7."""
    return max(1, math.ceil(Fraction(repr(float(density))) * length))


def wire_taken(wanted: Wire, hosts: int, coded: bool) -> Wire:
    """The wire of steps: the setting; for "auto" one that does not round, by where the ranks are.

    Args:
        hosts: that the ranks are on.
        coded: the method's entries may travel in another way than plain.
    """
    if wanted != "auto":
        return wanted
    return "float32" if coded and hosts > 1 else "plain"


def exchange_taken(wanted: Exchange) -> Exchange:
    """The exchange of steps: the setting; "direct" for "auto", as no number of ranks alone makes a grid the faster one."""
    return "direct" if wanted == "auto" else wanted


def plain(value: object) -> Any:
    """A NumPy scalar as a Python number, a float32 as the shortest decimal that it prints as."""
    if isinstance(value, np.floating):
        return float(str(value))
    return value.item() if isinstance(value, np.generic) else value


def selection_cap(k: int) -> int:
    """The most entries a selection of k may hold: 5k/4, rounded down."""
    return int(k * SELECTION_CAP)
