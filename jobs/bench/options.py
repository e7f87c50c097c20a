"""The bench's command line, checked as a whole before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives.sparse import check_length
from jobs.bench.arguments import (
    ABLATION_RANKS,
    BUDGET,
    DENSITY,
    KNOWN,
    LIBRARY_METHODS,
    ROW_STEPS,
    ROW_WARMUP,
    STEPS,
    SWEEP_DENSITY,
    SWEEP_LENGTH,
    TABLE_METHODS,
    TABLE_ROWS,
    TABLES,
    TOUCHED,
    VGG_LENGTH,
    WIDTH,
    parser,
)
from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.links import bits_per_second
from jobs.bench.row_volume import SKEWS
from oktopk import METHODS, Settings
from oktopk.devices import GRADIENT_TYPES
from oktopk.settings import DENSE_ABOVE

_RECORD = ("seed", "json", "network", "quiet", "commit")
"""Options of every bench, taken as they are."""


@dataclass(frozen=True)
class Options:
    """What was asked for; the same on all ranks.

    Attributes:
        methods: names in KNOWN[device], each once.
        length: n of the first run; None with a recording, whose it is.
        more_lengths: of the runs that follow.
        warmup: steps discarded.
        dense_steps: steps measured of dense methods.
        gradients: a name in PROFILES.
        replay: a folder written by jobs.run.gradient_file, instead.
        gradient_type: a name in GRADIENT_TYPES[device].
        settings: keywords of oktopk.Settings besides density, for all methods.
        ranks: numbers of ranks that an ablation is started on; empty: the surrounding mpiexec's.
        sweep_ranks: numbers of ranks of a sweep; empty: no sweep.
        memory: watch allocations in the last steps of the warm-up.
        network: what joins the ranks, in words for the record.
        link: rate of each host's link, as `jobs.bench.links.bits_per_second` takes it; "" where it is not told.
        table: a name in TABLES; "" for none.
        rows: numbers of the table's rows from 1; empty: all.
        types: gradient types of the table; empty: both.
        budget: seconds after which no further cell is begun.
        touched, table_rows, width: of the table of rows: drawn a rank and step, in the table, elements of one.
        skew: how they are drawn, a name in SKEWS.
        commit: what is measured, where this is no checkout that knows.
    """

    methods: tuple[str, ...]
    length: int | None
    density: float
    steps: int
    warmup: int
    dense_steps: int
    gradients: str
    replay: Path | None
    seed: int
    device: str
    gradient_type: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    ablate: bool = False
    ranks: tuple[int, ...] = ()
    sweep_ranks: tuple[int, ...] = ()
    json: Path | None = None
    memory: bool = True
    network: str = ""
    link: str = ""
    more_lengths: tuple[int, ...] = ()
    quiet: bool = False
    table: str = ""
    rows: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    budget: float = BUDGET
    touched: int = TOUCHED
    table_rows: int = TABLE_ROWS
    width: int = WIDTH
    skew: str = SKEWS[0]
    commit: str = ""

    @property
    def threshold_interval(self) -> int:
        """Steps between exact ones."""
        return int(self.settings.get("threshold_interval", Settings.threshold_interval))

    def words(self) -> list[str]:
        """The command line of one run of these, on ranks that are started already."""
        words = ["--methods", *self.methods, "--density", str(self.density), "--steps", str(self.steps)]
        words += ["--warmup", str(self.warmup), "--dense-steps", str(self.dense_steps)]
        words += ["--seed", str(self.seed), "--device", self.device]
        words += ["--replay", str(self.replay)] if self.replay else ["--gradients", self.gradients]
        lengths = [] if self.length is None else [self.length, *self.more_lengths]
        words += ["--length", ",".join(map(str, lengths))] if lengths else []
        words += [f"--set={name}={json.dumps(value)}" for name, value in self.settings.items()]
        words += ["--gradient-type", self.gradient_type]
        words += ["--network", self.network] if self.network else []
        words += ["--link", self.link] if self.link else []
        words += [] if self.memory else ["--no-memory"]
        words += ["--ablate"] if self.ablate else []
        return words + (["--quiet"] if self.quiet else [])


def parse(words: Sequence[str], *, launched: bool) -> Options:
    """Check a command line.

    Args:
        words: what follows the program's name.
        launched: by mpiexec; then nothing that starts one can be done.

    Raises:
        BenchError: it cannot be done; the message says what and why.
    """
    given = parser().parse_args(words)
    if given.table:
        _check_table(given)
    if given.table == "gpu":
        return _table(given)
    if given.table == "rows":
        return _rows_table(given)
    for name in ("rows", "budget", "table_rows", "width", "skew"):
        if getattr(given, name) is not None:
            raise BenchError(f"--{name.replace('_', '-')} is for --table")
    device = given.device or "cpu"
    gradient_type = given.gradient_type or "float32"
    if gradient_type not in GRADIENT_TYPES[device]:
        taken = ", ".join(GRADIENT_TYPES[device])
        raise BenchError(f"gradient type {gradient_type!r} is not one of {taken} on --device {device}")
    sweep = _numbers("--sweep-ranks", given.sweep_ranks)
    ranks = _numbers("--ranks", given.ranks)
    if sweep and given.ablate:
        raise BenchError("--ablate and --sweep-ranks are two different benches: ask for one")
    if launched and (sweep or ranks):
        raise BenchError(
            f"{'--sweep-ranks' if sweep else '--ranks'} starts mpiexec itself: run it without one"
        )
    if ranks and not given.ablate:
        raise BenchError("--ranks is for --ablate; else start the bench with mpiexec")
    default = ("oktopk",) if given.ablate else tuple(METHODS) if sweep else None
    methods = _methods(given.methods, default, device)
    if given.ablate and methods != ("oktopk",):
        raise BenchError(f"--ablate compares settings of oktopk, not methods {', '.join(methods)}")
    density = given.density if given.density is not None else SWEEP_DENSITY if sweep else DENSITY
    if not 0 < density <= DENSE_ABOVE:
        raise BenchError(f"density {density} is not in (0, {DENSE_ABOVE}]: above, every method runs densely")
    warmup = math.ceil(2 / density) if given.warmup is None else given.warmup
    if warmup < 0:
        raise BenchError(f"warmup {warmup} is not at least 0")
    lengths = _lengths(given.length)
    if not lengths and given.replay is None:
        lengths = (SWEEP_LENGTH if sweep else VGG_LENGTH,)
    if len(lengths) > 1 and (sweep or given.ablate or given.table or given.replay is not None):
        raise BenchError("--length takes one length with --ablate, --sweep-ranks, --table or --replay")
    if given.link:
        bits_per_second(given.link)
    steps = STEPS if given.steps is None else given.steps
    options = Options(
        methods=methods,
        length=lengths[0] if lengths else None,
        more_lengths=lengths[1:],
        density=density,
        steps=steps,
        warmup=warmup,
        dense_steps=steps if given.dense_steps is None else given.dense_steps,
        gradients=given.gradients or ("clustered" if given.ablate else "heavy"),
        replay=given.replay,
        device=device,
        gradient_type=gradient_type,
        settings=_settings(given.settings, density),
        ablate=given.ablate,
        ranks=ranks or (ABLATION_RANKS if given.ablate and not launched else ()),
        sweep_ranks=sweep,
        memory=given.memory and not sweep,
        table=given.table,
        link=given.link,
        **{name: getattr(given, name) for name in _RECORD},
    )
    _check_steps(options)
    return options


def _check_table(given: argparse.Namespace) -> None:
    free = {"table", "device", *TABLES[given.table], *_RECORD}
    silent = parser().parse_args([])
    for name, value in vars(given).items():
        if name not in free and value != getattr(silent, name):
            option = {"settings": "set", "memory": "no-memory"}.get(name, name.replace("_", "-"))
            raise BenchError(f"--{option} is not for --table {given.table}: it says how it is measured")


def _table(given: argparse.Namespace) -> Options:
    """Of the table of GPUs, whose cells say all that matters."""
    if given.device not in (None, "cuda"):
        raise BenchError(f"--table {given.table} is measured on --device cuda, not {given.device}")
    if given.gradient_type == "float16":
        raise BenchError("gradient type 'float16' is not one of float32, bfloat16, the table's")
    budget = BUDGET if given.budget is None else given.budget
    if not budget > 0:
        raise BenchError(f"budget {budget:g} is not above 0 seconds")
    return Options(
        methods=TABLE_METHODS,
        length=None,
        density=DENSITY,
        steps=STEPS,
        warmup=0,
        dense_steps=STEPS,
        gradients="heavy",
        replay=None,
        device="cuda",
        types=() if given.gradient_type is None else (given.gradient_type,),
        table=given.table,
        rows=_numbers("--rows", given.rows, "numbers of rows such as 1,4", "row"),
        budget=budget,
        **{name: getattr(given, name) for name in _RECORD},
    )


def _rows_table(given: argparse.Namespace) -> Options:
    """Of the table of rows."""
    touched = _numbers("--rows", given.rows, "numbers such as 50000", "number of rows") or (TOUCHED,)
    if len(touched) > 1:
        raise BenchError(f"--rows {given.rows!r} is not one number, which --table rows takes")
    defaults = {"table_rows": TABLE_ROWS, "width": WIDTH, "steps": ROW_STEPS, "warmup": ROW_WARMUP}
    numbers = {name: getattr(given, name) for name in defaults}
    numbers |= {name: default for name, default in defaults.items() if numbers[name] is None}
    for name, value in numbers.items():
        least = int(name != "warmup")
        if value < least:
            raise BenchError(f"{name.replace('_', '-')} {value} is not at least {least}")
    return Options(
        methods=(),
        length=None,
        density=DENSITY,
        dense_steps=numbers["steps"],
        gradients="heavy",
        replay=None,
        device=given.device or "cpu",
        table=given.table,
        touched=touched[0],
        skew=given.skew or SKEWS[0],
        **numbers,
        **{name: getattr(given, name) for name in _RECORD},
    )


def _check_steps(options: Options) -> None:
    interval = options.threshold_interval
    if options.steps < interval:
        raise BenchError(
            f"steps {options.steps} is not at least {interval}, the threshold interval: "
            "no exact step would be sure to be among them (--set threshold_interval=... is the other way out)"
        )
    if not 1 <= options.dense_steps <= options.steps:
        raise BenchError(f"dense-steps {options.dense_steps} is not in [1, {options.steps}], the steps")


def _numbers(
    name: str, text: str | None, such: str = "numbers such as 2,4,8", what: str = "number of ranks"
) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise BenchError(f"{name} {text!r} is not a list of {such}") from None
    if min(numbers) < 1:
        raise BenchError(f"{name} {text!r} has a {what} that is not at least 1")
    return numbers


def _lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        lengths = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise BenchError(
            f"--length {text!r} is not a number of elements, nor several such as 100,200"
        ) from None
    for length in lengths:
        try:
            check_length(length)
        except ValueError as error:
            raise BenchError(str(error)) from None
    return lengths


def _methods(given: Sequence[str] | None, default: tuple[str, ...] | None, device: str) -> tuple[str, ...]:
    known = KNOWN[device]
    if given is None:
        return default or (*METHODS, *(NCCL_ROWS if device == "cuda" else LIBRARY_METHODS[:1]))
    names = [name for words in given for name in words.split(",") if name]
    for name in names:
        if name not in known:
            where = f" on --device {device}" if any(name in names for names in KNOWN.values()) else ""
            raise BenchError(f"method {name!r} is not one of {', '.join(known)}{where}")
    if not names:
        raise BenchError(f"no method is named; there are {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _settings(given: Sequence[str], density: float) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    known = [setting.name for setting in dataclasses.fields(Settings) if setting.name != "density"]
    for word in given:
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            raise BenchError(f"--set {word!r} is not NAME=VALUE with a name of {', '.join(known)}")
        try:
            settings[name] = math.inf if text == "inf" else json.loads(text)
        except ValueError:
            settings[name] = text
    try:
        Settings(density=density, **settings)
    except (TypeError, ValueError) as error:
        raise BenchError(str(error)) from None
    return settings
