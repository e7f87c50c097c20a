"""The bench's options: each with its default and its help text, read from the command line and checked as a whole."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from collectives.sparse import check_length
from data.command import attribute_texts
from jobs.bench.device import DEVICES, PROFILES
from jobs.bench.document import HOST_ROWS, NCCL_ROWS, BenchError
from oktopk import METHODS, Settings
from oktopk.devices import GRADIENT_TYPES
from oktopk.settings import DENSE_ABOVE

OVER_MPI = "oktopk-mpi"
"""On a GPU: Ok-Topk kept to MPI where it could do without."""
KNOWN = {
    "cpu": (*METHODS, "mpi", *HOST_ROWS),
    "cuda": (*METHODS, OVER_MPI, *NCCL_ROWS, *HOST_ROWS),
}
"""device -> what `--methods` takes."""


def _at_least(least: int) -> Callable[[str], int]:
    """Reads a number of at least `least`, for a parser."""

    def read(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
        return value

    read.__name__ = "int"
    return read


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers of at least 1, for a parser."""
    try:
        return tuple(map(_at_least(1), text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4,8") from None


class _Setting(argparse.Action):
    """Collects NAME=VALUE words in a dictionary."""

    def __call__(self, parser: Any, namespace: Any, word: Any, option_string: Any = None) -> None:
        known = [setting.name for setting in fields(Settings) if setting.name != "density"]
        name, equals, text = word.partition("=")
        if not equals or name not in known:
            raise BenchError(f"--set {word!r} is not NAME=VALUE with a name of {', '.join(known)}")
        try:
            value = math.inf if text == "inf" else json.loads(text)
        except ValueError:
            value = text
        namespace.settings = {**getattr(namespace, "settings", {}), name: value}


@dataclass(frozen=True)
class Options:
    """What is measured, and how; equal on all ranks. The text of an attribute is the help of its option.

    Attributes:
        methods: Methods to measure, of {cpu}; default: all but those that begin with oktopk-.
            On --device cuda of {cuda}; default: all but those that begin with oktopk-. Rows such as oktopk-hosts-int4 name
            levels and wire
        lengths: Number of elements of the gradient, or several such as 14728266,133547324, measured one after another;
            default: 14728266, those of VGG-16
        density: Share of the entries applied per step, in (0, {densest}]; default: 0.01
        steps: Number of steps to measure, at least the threshold interval; default: 64
        warmup: Number of steps discarded before those, at least 0; default: 2/density, rounded up
        dense_steps: Number of steps to measure of dense methods, from 1 to --steps; default: --steps
        gradients: Kind of the random gradients; default: heavy
        seed: Seed of the random gradients; default: 1
        device: Device that gradients lie on; default: cpu
        gradient_type: Type of the gradients, on a CPU float32 alone; default: float32
        settings: Setting of the reduction for all methods, such as threshold_interval=32; may be repeated
        commit: Commit that is measured, for the record; default: the one that git names
        json: File to write all results to; default: none
        network: Network that joins the ranks, in words for the record; default: none
        quiet: Print neither tables nor progress on the terminal
    """

    methods: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (14_728_266,)
    density: float = 0.01
    steps: int = 64
    warmup: int = -1  # until it is known, by the density
    dense_steps: int = -1  # until they are known, by the steps
    gradients: str = "heavy"
    seed: int = 1
    device: str = "cpu"
    gradient_type: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    json: Path | None = None
    network: str = ""
    quiet: bool = False
    module: str = "jobs.bench"  # that the command of the document names

    @property
    def length(self) -> int:
        """n, of the first run."""
        return self.lengths[0]

    @property
    def threshold_interval(self) -> int:
        """Steps between exact ones."""
        return int(self.settings.get("threshold_interval", Settings.threshold_interval))


TEXTS = attribute_texts(Options)
OPTIONS = {name: "--" + name.replace("_", "-") for name in TEXTS}
OPTIONS |= {"lengths": "--length", "settings": "--set"}
"""Field -> its flag."""
_READ: dict[str, dict[str, Any]] = {
    "methods": {"nargs": "+", "metavar": "NAME"},
    "lengths": {"type": numbers, "metavar": "N,N"},
    "density": {"type": float, "metavar": "SHARE"},
    "steps": {"type": _at_least(1), "metavar": "N"},
    "warmup": {"type": _at_least(0), "metavar": "N"},
    "dense_steps": {"type": _at_least(1), "metavar": "N"},
    "gradients": {"choices": tuple(PROFILES)},
    "seed": {"type": int, "metavar": "N"},
    "device": {"choices": DEVICES},
    "gradient_type": {"choices": GRADIENT_TYPES["cuda"]},
    "settings": {"action": _Setting, "metavar": "NAME=VALUE"},
    "json": {"type": Path, "metavar": "FILE"},
    "quiet": {"action": "store_true"},
}
"""Field -> how its option is read; others are a text."""


class Parser(argparse.ArgumentParser):
    """One that raises BenchError for what it does not take."""

    def error(self, message: str) -> NoReturn:
        # not printed from here: every rank may parse, one speaks
        if match := re.match(r"unrecognized arguments: (-n|-np|--np|--ranks)\b", message):
            message += (
                f" ({match[1]} is an option of the launcher: python -m jobs.launch -n RANKS -m jobs.bench)"
            )
        raise BenchError(message)


def parser() -> argparse.ArgumentParser:
    """A parser that raises BenchError and prints nothing."""
    command_line = Parser(
        prog="python -m jobs.launch -n RANKS -m jobs.bench",
        description="Time gradient allreduces on the same gradients in one run, and count their words and messages.",
        epilog="examples:\n"
        "  python -m jobs.launch -n 4 -m jobs.bench --methods oktopk,mpi --length 14728266 --density 0.01 --json bench.json\n"
        "  python -m jobs.launch -n 2 -m jobs.bench --device cuda --methods oktopk nccl --json gpu.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # what the words name, and nothing else
    )
    known = {device: ", ".join(names) for device, names in KNOWN.items()}
    for name, text in TEXTS.items():
        how = _READ.get(name, {"metavar": "TEXT"})
        command_line.add_argument(
            OPTIONS[name], dest=name, help=text.format(densest=DENSE_ABOVE, **known), **how
        )
    return command_line


def parse(words: Sequence[str]) -> Options:
    """Check a command line: what follows the program's name.

    Raises:
        BenchError: it cannot be done; the message names the value and the bound.
    """
    options = Options(**vars(parser().parse_args(words)))
    device, density, steps = options.device, options.density, options.steps
    if options.gradient_type not in GRADIENT_TYPES[device]:
        types = ", ".join(GRADIENT_TYPES[device])
        raise BenchError(
            f"gradient type {options.gradient_type!r} is not one of {types} on --device {device}"
        )
    methods = _checked_methods(options.methods, device)
    if not 0 < density <= DENSE_ABOVE:
        raise BenchError(f"density {density} is not in (0, {DENSE_ABOVE}]: above, every method runs densely")
    try:
        for length in options.lengths:
            check_length(length)
        Settings(density=density, **options.settings)
    except (TypeError, ValueError) as error:
        raise BenchError(str(error)) from None
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


def _checked_methods(words_of_option: Sequence[str], device: str) -> tuple[str, ...]:
    known = KNOWN[device]
    if not words_of_option:
        return (*METHODS, *(NCCL_ROWS if device == "cuda" else ("mpi",)))
    names = [name for words in words_of_option for name in words.split(",") if name]
    for name in names:
        if name not in known:
            where = f" on --device {device}" if any(name in names for names in KNOWN.values()) else ""
            raise BenchError(f"method {name!r} is not one of {', '.join(known)}{where}")
    if not names:
        raise BenchError(f"no method is named; there are {', '.join(known)}")
    return tuple(dict.fromkeys(names))
