"""Checks the bench's command line as a whole, before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
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
from jobs.bench.rate import bits_per_second
from jobs.bench.row_volume import SKEWS
from oktopk import METHODS, Settings
from oktopk.devices import GRADIENT_TYPES
from oktopk.settings import DENSE_ABOVE

JOB = "OKTOPK_BENCH_JOB"
"""Set in the jobs that a sweep or an ablation starts."""
_RECORD = ("table", "seed", "json", "network", "quiet", "commit")
"""Options of every bench, taken as they are."""


@dataclass(frozen=True)
class Options:
    """The options, equal on all ranks. `--help` explains those that are not listed here.

    Attributes:
        methods: names in KNOWN[device], each once.
        length: n, of the first run; None for a table that has its own.
        more_lengths: of the runs that follow.
        gradients: a name in PROFILES.
        gradient_type: a name in GRADIENT_TYPES[device].
        settings: keywords of oktopk.Settings besides density, for all methods.
        ranks, sweep_ranks: numbers of ranks to start an ablation or a sweep on; empty: none are started.
        memory: watch allocations in the last steps of the warm-up.
        link: rate of each host's link, as `jobs.bench.rate.bits_per_second` takes it; "" where it is not given.
        table: a name in TABLES; "" for none.
        rows: numbers of the table's rows from 1; empty: all.
        types: gradient types of the table; empty: both.
        touched, table_rows, width: of the table of rows: drawn a rank and step, in the table, elements of one.
        skew: a name in SKEWS.
    """

    methods: tuple[str, ...] = ()
    length: int | None = None
    density: float = DENSITY
    steps: int = STEPS
    warmup: int = 0
    dense_steps: int = STEPS
    gradients: str = "heavy"
    seed: int = 1
    device: str = "cpu"
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


def parse(words: Sequence[str], *, launched: bool) -> Options:
    """Check a command line.

    Args:
        words: what follows the program's name.
        launched: by mpiexec; then nothing that starts one can be done, but in a job that a sweep or an ablation has started.

    Raises:
        BenchError: it cannot be done; the message names the value and the bound.
    """
    given = parser().parse_args(words)
    free, silent = {"device", *TABLES[given.table], *_RECORD}, parser().parse_args([])
    for name, value in vars(given).items():
        if name not in free and value != getattr(silent, name):
            why = (
                f"not for --table {given.table}: it says how it is measured" if given.table else "for --table"
            )
            raise BenchError(f"{_option(name)} is {why}")
    if given.table in ("dense", "gpu"):
        return _gpu_table(given)
    if given.table == "rows":
        return _rows_table(given)
    device, gradient_type = given.device or "cpu", given.gradient_type or "float32"
    if gradient_type not in GRADIENT_TYPES[device]:
        taken = ", ".join(GRADIENT_TYPES[device])
        raise BenchError(f"gradient type {gradient_type!r} is not one of {taken} on --device {device}")
    sweep = given.sweep_ranks
    if sweep and given.ablate:
        raise BenchError("--ablate and --sweep-ranks are two different benches: ask for one")
    if launched and sweep and JOB not in os.environ:
        raise BenchError("--sweep-ranks starts mpiexec itself: run it without one")
    default = ("oktopk",) if given.ablate else tuple(METHODS) if sweep else None
    methods = _methods(given.methods, default, device)
    if given.ablate and methods != ("oktopk",):
        raise BenchError(f"--ablate compares settings of oktopk, not methods {', '.join(methods)}")
    density = _given(given.density, SWEEP_DENSITY if sweep else DENSITY)
    if not 0 < density <= DENSE_ABOVE:
        raise BenchError(f"density {density} is not in (0, {DENSE_ABOVE}]: above, every method runs densely")
    lengths = given.length or (SWEEP_LENGTH if sweep else VGG_LENGTH,)
    if len(lengths) > 1 and (sweep or given.ablate or given.table):
        raise BenchError("--length takes one length with --ablate, --sweep-ranks and --table")
    if given.link:
        bits_per_second(given.link)
    steps = _given(given.steps, STEPS)
    options = Options(
        methods=methods,
        length=lengths[0],
        more_lengths=lengths[1:],
        density=density,
        steps=steps,
        warmup=_given(given.warmup, math.ceil(2 / density)),
        dense_steps=_given(given.dense_steps, steps),
        gradients=given.gradients or ("clustered" if given.ablate else "heavy"),
        device=device,
        gradient_type=gradient_type,
        settings=_settings(given.settings, density),
        ablate=given.ablate,
        ranks=ABLATION_RANKS if given.ablate and not launched else (),
        sweep_ranks=sweep,
        memory=given.memory and not sweep,
        link=given.link,
        **_record(given),
    )
    _check_course(options)
    return options


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _record(given: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(given, name) for name in _RECORD}


def _option(name: str) -> str:
    return "--" + {"settings": "set", "memory": "no-memory"}.get(name, name.replace("_", "-"))


def _check_course(options: Options) -> None:
    for length in (options.length, *options.more_lengths):
        try:
            check_length(length or 0)
        except ValueError as error:
            raise BenchError(str(error)) from None
    interval = options.threshold_interval
    if options.steps < interval:
        raise BenchError(
            f"steps {options.steps} is not at least {interval}, the threshold interval: "
            "no exact step would be sure to be among them (--set threshold_interval=... is the other way out)"
        )
    if options.dense_steps > options.steps:
        raise BenchError(f"dense-steps {options.dense_steps} is not in [1, {options.steps}], the steps")


def _gpu_table(given: argparse.Namespace) -> Options:
    if given.device not in (None, "cuda"):
        raise BenchError(f"--table {given.table} is measured on --device cuda, not {given.device}")
    if given.table == "gpu" and given.gradient_type == "float16":
        raise BenchError("gradient type 'float16' is not one of float32, bfloat16, the table's")
    return Options(
        methods=TABLE_METHODS,
        device="cuda",
        types=() if given.gradient_type is None else (given.gradient_type,),
        rows=given.rows or (),
        budget=_given(given.budget, BUDGET),
        **_record(given),
    )


def _rows_table(given: argparse.Namespace) -> Options:
    touched = given.rows or (TOUCHED,)
    if len(touched) > 1:
        raise BenchError(f"--rows {','.join(map(str, touched))} is not one number, which --table rows takes")
    defaults = {"table_rows": TABLE_ROWS, "width": WIDTH, "steps": ROW_STEPS, "warmup": ROW_WARMUP}
    numbers = {name: _given(getattr(given, name), default) for name, default in defaults.items()}
    return Options(
        device=given.device or "cpu",
        touched=touched[0],
        skew=given.skew or SKEWS[0],
        **numbers,
        **_record(given),
    )


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
