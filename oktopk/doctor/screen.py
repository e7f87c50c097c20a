"""The doctor's findings as one screen of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from oktopk.doctor.children import TRIES
from oktopk.doctor.verdict import BEST, CANNOT, SLOWER

WIDTH = 100
_MEANING = {
    BEST: "the best that this hardware allows",
    SLOWER: "slower than this hardware allows",
    CANNOT: "several ranks cannot run like this",
}


def screen(findings: dict[str, Any]) -> str:
    """At most 45 lines of 100 columns, for up to eight GPUs of one kind."""
    machine, tried = findings["machine"], findings["tried"]
    host = (
        f"oktopk doctor: {machine['host']}, {machine['system']}, {machine['cores']} cores, {findings['date']}"
    )
    lines = [*textwrap.wrap(host, WIDTH), ""]
    software = [f"{name} {version}" for name, version in findings["versions"].items()]
    lines += _entry("software", "   ".join(software))
    lines += _entry("CPU", _cpu(machine, findings["kernels"]))
    for number, text in enumerate(_gpu(findings["gpu"])):
        lines += _entry("" if number else "GPUs", text)
    mpi = tried.get("host", {})
    starter = findings["mpi"]["command"] or "nothing"
    lines += _entry("MPI", f"{mpi.get('library', 'unknown')}; ranks are started by {starter}")
    if findings["environment"]:
        settings = " ".join(f"{name}={value}" for name, value in findings["environment"].items())
        lines += _entry("", "set: " + (settings if len(settings) < 240 else settings[:240] + " ..."))
    if tried:
        lines += ["", f"{'a sum by two processes':26}{'works':8}{'8 bytes':>12}{'64 MiB':>16}"]
    for name, result in tried.items():
        lines += _tried(TRIES[name].title, result)
    lines += ["", *textwrap.wrap(f"path: {findings['path']} ({_MEANING[findings['status']]})", WIDTH)]
    for advice in findings["advice"]:
        lines += textwrap.wrap(
            advice, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _entry(title: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{title:10}", subsequent_indent=" " * 10, break_on_hyphens=False
    )


def _cpu(machine: dict[str, Any], kernels: dict[str, Any]) -> str:
    bits = f", vectors of {machine['vector_bits']} bits" if machine.get("vector_bits") else ""
    text = f"{machine['cpu']}{bits}"
    if problem := kernels.get("problem"):
        return f"{text}; kernels: {problem}"
    if compiled := kernels.get("compiled"):
        return f"{text}; {compiled} kernels compiled now, for all jobs to come"
    return f"{text}; kernels are compiled" if kernels else text


def _gpu(gpu: dict[str, Any]) -> Iterator[str]:
    if not gpu["present"]:
        yield "none: this host has no NVIDIA driver, and runs on the CPU"
        return
    devices = gpu.get("devices", [])
    for text in dict.fromkeys(devices):
        numbers = [str(number) for number, each in enumerate(devices) if each == text]
        yield f"{', '.join(numbers)}: {text}"
    if devices:
        driver, runtime = (f"{gpu[of] // 1000}.{gpu[of] % 1000 // 10}" for of in ("driver", "runtime"))
        yield f"CuPy's CUDA {runtime}, and the driver's {driver}"
    if len(devices) > 1:
        denied = " ".join(gpu["no_access"])
        yield f"no peer access {denied}" if denied else "peer access between all pairs"
    if gpu["problem"]:
        yield f"not usable: {gpu['problem']}"


def _tried(title: str, result: dict[str, Any]) -> list[str]:
    if result["problem"]:
        return textwrap.wrap(
            result["problem"],
            WIDTH,
            initial_indent=f"  {title:24}{'no: ':4}",
            subsequent_indent=" " * 30,
            max_lines=3,
        )
    latency, bandwidth = f"{result['latency'] * 1e6:.1f} us", f"{result['bandwidth'] / 1e9:.1f} GB/s"
    line = f"  {title:24}{'yes':8}{latency:>12}{bandwidth:>16}"
    if gpus := result.get("gpus"):
        one, other = gpus
        line += f"   both on GPU {one}" if one == other else f"   GPUs {one} and {other}"
    return [line]
