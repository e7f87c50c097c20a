"""Reads the bench's command line, and checks it as a whole before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from collectives.sparse import check_length
from jobs.bench.device import DEVICES
from jobs.bench.document import NCCL_ROWS, BenchError, bits_per_second
from jobs.bench.gradients import PROFILES
from jobs.bench.options import ABLATION_RANKS, DEFAULTS, JOB, KNOWN, OF_EVERY_BENCH, OF_THE_GPU_TABLE, Options
from oktopk import METHODS, Settings
from oktopk.devices import GRADIENT_TYPES
from oktopk.settings import DENSE_ABOVE


def parse(words: Sequence[str], *, launched: bool) -> Options:
    """Check a command line.

    Args:
        words: what follows the program's name.
        launched: by mpiexec; then nothing that starts one can be done, but in a job that a sweep or an ablation has started.

    Raises:
        BenchError: it cannot be done; the message names the value and the bound.
    """
    values = vars(parser().parse_args(words))
    table, sweep, ablate = values.get("table", ""), "sweep_ranks" in values, "ablate" in values
    for name in values:
        if name not in OF_EVERY_BENCH and (name in OF_THE_GPU_TABLE) != bool(table):
            why = "not for --table gpu: it says how it is measured" if table else "for --table gpu"
            raise BenchError(f"{_option(name)} is {why}")
    if sweep and ablate:
        raise BenchError("--ablate and --sweep-ranks are two different benches: ask for one")
    if launched and sweep and JOB not in os.environ:
        raise BenchError("--sweep-ranks starts mpiexec itself: run it without one")
    kind = table or ("sweep" if sweep else "ablate" if ablate else "")
    options = Options(
        **DEFAULTS.get(kind, {}) | values, ranks=ABLATION_RANKS if ablate and not launched else ()
    )
    return _checked_bench(options) if options.lengths else _checked_table(options)


def _option(name: str) -> str:
    return "--" + {"settings": "set", "memory": "no-memory", "lengths": "length"}.get(
        name, name.replace("_", "-")
    )


def _checked_table(options: Options) -> Options:
    """The options of the GPU table, which has its own lengths."""
    if options.device != "cuda":
        raise BenchError(f"--table gpu is measured on --device cuda, not {options.device}")
    if options.gradient_type == "float16":
        raise BenchError("gradient type 'float16' is not one of float32, bfloat16, the table's")
    return options


def _checked_bench(options: Options) -> Options:
    """The options with what depends on others."""
    device, density, steps = options.device, options.density, options.steps
    if options.gradient_type not in GRADIENT_TYPES[device]:
        types = ", ".join(GRADIENT_TYPES[device])
        raise BenchError(
            f"gradient type {options.gradient_type!r} is not one of {types} on --device {device}"
        )
    methods = _checked_methods(options.methods, device)
    if options.ablate and methods != ("oktopk",):
        raise BenchError(f"--ablate compares settings of oktopk, not methods {', '.join(methods)}")
    if not 0 < density <= DENSE_ABOVE:
        raise BenchError(f"density {density} is not in (0, {DENSE_ABOVE}]: above, every method runs densely")
    if len(options.lengths) > 1 and (options.sweep_ranks or options.ablate or options.table):
        raise BenchError("--length takes one length with --ablate, --sweep-ranks and --table")
    try:
        for length in options.lengths:
            check_length(length)
        Settings(density=density, **options.settings)
    except (TypeError, ValueError) as error:
        raise BenchError(str(error)) from None
    if options.link:
        bits_per_second(options.link)
    interval = options.threshold_interval
    if steps < interval:
        raise BenchError(
            f"steps {steps} is not at least {interval}, the threshold interval: "
            "no exact step would be sure to be among them (--set threshold_interval=... is the other way out)"
        )
    dense_steps = steps if options.dense_steps < 0 else options.dense_steps
    if dense_steps > steps:
        raise BenchError(f"dense-steps {dense_steps} is not in [1, {steps}], the steps")
    warmup = math.ceil(2 / density) if options.warmup < 0 else options.warmup
    return replace(options, methods=methods, warmup=warmup, dense_steps=dense_steps)


def _checked_methods(given: Sequence[str], device: str) -> tuple[str, ...]:
    known = KNOWN[device]
    if not given:
        return (*METHODS, *(NCCL_ROWS if device == "cuda" else ("mpi",)))
    names = [name for words in given for name in words.split(",") if name]
    for name in names:
        if name not in known:
            where = f" on --device {device}" if any(name in names for names in KNOWN.values()) else ""
            raise BenchError(f"method {name!r} is not one of {', '.join(known)}{where}")
    if not names:
        raise BenchError(f"no method is named; there are {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    """Reads a number of at least `least`, for a parser."""

    def read(text: str) -> float:
        if not (value := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
        return value

    read.__name__ = kind.__name__
    return read


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers of at least 1, for a parser."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4,8") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} is not at least 1")
    return found


class _Setting(argparse.Action):
    """Collects NAME=VALUE words in a dictionary."""

    def __call__(self, parser: Any, namespace: Any, word: Any, option_string: Any = None) -> None:
        known = [setting.name for setting in dataclasses.fields(Settings) if setting.name != "density"]
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            raise BenchError(f"--set {word!r} is not NAME=VALUE with a name of {', '.join(known)}")
        try:
            value = math.inf if text == "inf" else json.loads(text)
        except ValueError:
            value = text
        namespace.settings = {**getattr(namespace, "settings", {}), name: value}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # not printed from here: every rank parses, one speaks
        if match := re.match(r"unrecognized arguments: (-n|-np|--np|--ranks)\b", message):
            message += (
                f" ({match[1]} is an option of the launcher: python -m jobs.launch -n RANKS -m jobs.bench)"
            )
        raise BenchError(message)


def usage() -> str:
    """The text of --help."""
    return parser().format_help()


def parser() -> argparse.ArgumentParser:
    """A parser that raises BenchError and prints nothing."""
    parser = _Parser(
        prog="mpiexec -n RANKS python -m mpi4py -m jobs.bench",
        description="Time gradient allreduces on the same gradients in one run, and count their words, messages and memory.",
        epilog="examples:\n"
        "  mpiexec -n 4 python -m mpi4py -m jobs.bench --methods oktopk,mpi --length 14728266 --density 0.01 --json bench.json\n"
        "  python -m jobs.bench --ablate --json ablation.json\n"
        "  python -m jobs.bench --sweep-ranks 2,4,8,16,32,64 --json sweep.json\n"
        "  mpiexec -n 4 python -m mpi4py -m jobs.bench --table gpu --json gpu.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # what the words name, and nothing else
    )
    add, sweep = parser.add_argument, DEFAULTS["sweep"]
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help=f"Methods to measure, of {', '.join(KNOWN['cpu'])}; default: all but mpi-ring, "
        f"mpi-rabenseifner and those that begin with oktopk-. On --device cuda of {', '.join(KNOWN['cuda'])}; default: all but "
        "those that begin with oktopk-. Rows such as oktopk-hosts-int4 name levels and wire",
    )
    text = (
        f"Number of elements of the gradient, or several such as 14728266,133547324, measured one after another; default: "
        f"{Options.lengths[0]}, those of VGG-16; {sweep['lengths'][0]} with --sweep-ranks"
    )
    add("--length", dest="lengths", type=numbers, metavar="N,N", help=text)
    text = f"Share of the entries applied per step, in (0, {DENSE_ABOVE}]; default: {Options.density}, "
    text += f"{sweep['density']} with --sweep-ranks"
    add("--density", type=float, help=text)
    text = f"Number of steps to measure, at least the threshold interval; default: {Options.steps}"
    add("--steps", type=number(int, 1), metavar="STEPS", help=text)
    text = "Number of steps discarded before those, at least 0; default: 2/density, rounded up"
    add("--warmup", type=number(int, 0), metavar="STEPS", help=text)
    text = "Number of steps to measure of dense methods, from 1 to --steps; default: --steps"
    add("--dense-steps", type=number(int, 1), metavar="STEPS", help=text)
    text = "Kind of the random gradients; default: heavy, with --ablate clustered"
    add("--gradients", choices=tuple(PROFILES), help=text)
    add("--seed", type=int, help=f"Seed of the random gradients; default: {Options.seed}")
    add("--device", choices=DEVICES, help="Device that gradients lie on; default: cpu, with --table gpu cuda")
    text = "Type of the gradients, on a CPU float32 alone; default: float32, with --table both of its types"
    add("--gradient-type", choices=GRADIENT_TYPES["cuda"], help=text)
    add(
        "--set",
        dest="settings",
        action=_Setting,
        metavar="NAME=VALUE",
        help="Setting of the reduction for all methods, such as threshold_interval=32; may be repeated",
    )
    text = "Measure Ok-Topk with each of its ideas taken away in turn; starts mpiexec on 4 and on 8 ranks, unless under one"
    add("--ablate", action="store_true", help=text)
    text = "Numbers of ranks to count words on, each at least 1; starts an mpiexec for each of them"
    add("--sweep-ranks", type=numbers, metavar="P,P,...", help=text)
    text = "Table to measure in place of one run: gpu, ten cells beside NCCL; default: none"
    add("--table", choices=("gpu",), help=text)
    text = "Numbers of the rows of --table gpu to measure, from 1; default: all"
    add("--rows", type=numbers, metavar="I,I", help=text)
    text = f"Start no further cell of --table gpu after so many seconds, at least 0; default: {DEFAULTS['gpu']['budget']:g}"
    add("--budget", type=number(float, 0), metavar="SECONDS", help=text)
    text = "Commit that is measured, for the record; default: the one that git names"
    add("--commit", metavar="TEXT", help=text)
    add("--json", type=Path, metavar="FILE", help="File to write all results to; default: none")
    text = "Skip the measurement of memory, which slows the last steps of the warm-up"
    add("--no-memory", dest="memory", action="store_false", help=text)
    text = "Network that joins the ranks, in words for the record"
    add("--network", metavar="TEXT", help=text)
    text = (
        "Rate of the link of each host, such as 10gbit, or none where links are unshaped: the table shows floors by it, and a "
        "transfer of a step's size shows whether it holds"
    )
    add("--link", metavar="RATE", help=text)
    add("--quiet", action="store_true", help="Print neither tables nor progress on the terminal")
    return parser
