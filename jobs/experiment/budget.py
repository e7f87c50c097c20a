"""How long runs take, by those that are done: what a plan says before it starts, and whether another run fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jobs.experiment.trials import Trial

START_SECONDS = 20.0
"""A launch: imports, MPI, the first touch of a GPU."""

RUN_SECONDS = 3.0
"""What a run takes beside its steps: its network, its kernels, its file."""


@dataclass
class Pace:
    """Seconds that runs took.

    Attributes:
        guesses: Trial.work -> seconds of a run where none was measured.
        measured: (work, method, ranks, seconds) of each run that is done.
    """

    guesses: Mapping[str, float]
    measured: list[tuple[str, str, int, float]] = field(default_factory=list)

    def add(self, trial: Trial, seconds: float) -> None:
        self.measured.append((trial.work, trial.method, trial.ranks, seconds))

    def seconds(self, trial: Trial) -> float:
        """What a run is expected to take: as one of its method and ranks did, else the slowest of its ranks or work."""
        alike = [seconds for *key, seconds in self.measured if key == [trial.work, trial.method, trial.ranks]]
        if alike:
            return sum(alike) / len(alike)
        for same in ((trial.work, trial.ranks), (trial.work,)):
            near = [s for work, _, ranks, s in self.measured if (work, ranks)[: len(same)] == same]
            if near:
                return max(near)
        return self.guesses[trial.work]

    def known(self, trial: Trial) -> bool:
        """Whether a run of such work was measured."""
        return any(work == trial.work for work, *_ in self.measured)


def launches(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials by their number of ranks, in order of appearance: those of one launch together."""
    found: dict[int, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.ranks, []).append(trial)
    return list(found.values())
