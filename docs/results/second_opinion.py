"""SimGrid's time of the same steps beside the replay's: prints the table of replayed.md.

    apt-get install libsimgrid-dev          # 3.32 of Debian 12: smpirun and its replay of traces
    python -m docs.results.second_opinion [RANKS ...]

The program of a step (`oktopk.replay.program`) becomes one trace a rank, of messages and waits alone. SimGrid shares a link
between the messages on it, where the replay lets them queue. Both have one rank a host, links for each direction, the same
latency, the time of messages at their ends, and the size above which a message waits for its receiver.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from docs.results.replayed import LATENCY, NO_KERNELS, WORKLOADS, ms, rows
from jobs.render.chart import title_of
from oktopk.replay.engine import replay
from oktopk.replay.network import Level, Network
from oktopk.replay.program import program_of
from oktopk.replay.recording import Step
from oktopk.replay.valueless import COMPUTE, RECEIVE, SEND, WAIT
from oktopk.settings import Settings

RANKS = (4, 16, 64, 256)
METHODS = ("oktopk", "union", "topka", "dense")
GIGABITS = (10, 100)
BYTE = 6  # SimGrid's number of MPI_BYTE
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <zone id="world" routing="Full">
    <cluster id="hosts" prefix="h" suffix="" radical="0-{last}" speed="1Gf" bw="{rate}Bps" lat="{latency}s"
             sharing_policy="SPLITDUPLEX"/>
  </zone>
</platform>
"""


def traces(program, folder):
    """Write a trace of each rank, and their list; returns its path."""
    files = []
    for rank in range(program.ranks):
        partners = program.partners(rank)
        begin, end = (0, program.start[1]) if program.shared else program.start[rank : rank + 2]
        lines = [f"{rank} init"]
        lines += [line for i in range(begin, end) for line in words(program, partners, rank, i)]
        path = folder / f"{rank}.txt"
        path.write_text("\n".join([*lines, f"{rank} finalize"]) + "\n")
        files.append(str(path))
    whole = folder / "trace.txt"
    whole.write_text("\n".join(files) + "\n")
    return whole


def words(program, partners, rank, i):
    """The lines of an operation. A message's tag is its number at the sender."""
    kind = program.kind[i]
    if kind == COMPUTE:
        return
    if kind == WAIT:
        for j in program.waits[program.first[i] : program.first[i + 1]]:
            other, sends = partners[j], program.kind[j] == SEND
            source, dest = (rank, other) if sends else (other, rank)
            yield f"{rank} wait {source} {dest} {program.slot[j] if sends else program.match[j]}"
        return
    other, size = partners[i], max(1, int(program.amount[i]))
    if kind == SEND:
        yield f"{rank} isend {other} {program.slot[i]} {size} {BYTE}"
    else:
        assert kind == RECEIVE
        room = (
            size + size // 16 + 1
        )  # with one program for all ranks a message may be 5 % longer at the other end
        yield f"{rank} irecv {other} {program.match[i]} {room} {BYTE}"


def simulated(program, level):
    """Seconds by SimGrid."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = traces(program, folder)
        rate, latency = 1 / level.G, level.L / 2  # a way has two links
        (folder / "platform.xml").write_text(
            PLATFORM.format(last=program.ranks - 1, rate=rate, latency=latency)
        )
        (folder / "hosts.txt").write_text("".join(f"h{rank}\n" for rank in range(program.ranks)))
        settings = {
            "network/model": "CM02",  # no factors of its own
            "network/latency-factor": 1,
            "network/bandwidth-factor": 1,
            "network/weight-S": 0,
            "network/TCP-gamma": 1e12,
            "network/crosstraffic": 0,
            "smpi/os": f"0:{level.o}:0",
            "smpi/ois": f"0:{level.o}:0",
            "smpi/or": f"0:{level.o}:0",
            "smpi/async-small-thresh": int(level.S),
            "smpi/send-is-detached-thresh": int(level.S),
            "smpi/simulate-computation": "no",
            "surf/precision": 1e-12,
        }
        command = ["smpirun", "-np", program.ranks, "-platform", folder / "platform.xml"]
        command += ["-hostfile", folder / "hosts.txt", "-replay", trace]
        command += [f"--cfg={name}:{value}" for name, value in settings.items()]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    match = re.search(r"Simulation time ([\d.e+-]+)", done.stdout + done.stderr)
    if match is None:
        raise SystemExit(f"smpirun failed: {(done.stdout + done.stderr)[-2000:]}")
    return float(match[1])


def cell(method, ranks, gigabits):
    """Milliseconds of the replay and of SimGrid."""
    level = Level.of_rate(gigabits * 125e6, LATENCY)
    level = Level(level.L, level.o, 0.0, level.G)  # SimGrid has no gap between messages
    network = Network(level, level)
    length, density = WORKLOADS["BERT"].length, WORKLOADS["BERT"].density
    program = program_of(Step(method, length, ranks, 1, Settings(density=density)))
    return replay(program, network, NO_KERNELS.rates(network, "plain")).seconds, simulated(program, level)


def main(ranks):
    """Print the table of these numbers of ranks, and how far the two are apart."""
    heads = ["ms: the replay, SimGrid, difference", *(f"{P} ranks" for P in ranks)]
    cells, differences = [], []
    for method in METHODS:
        for gigabits in GIGABITS:
            row = [f"{title_of(method)}, {gigabits} Gb/s"]
            for each in ranks:
                replayed, fluid = cell(method, each, gigabits)
                differences.append(replayed / fluid - 1)
                row.append(f"{ms(replayed)}, {ms(fluid)}, {100 * differences[-1]:.0f} %".replace("-", "−"))
                print(*row, flush=True, file=sys.stderr)
            cells.append(row)
    print(rows(heads, cells))
    sizes = np.abs(differences)
    print(f"\nmedian {100 * np.median(sizes):.1f} %, largest {100 * sizes.max():.0f} %")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or RANKS)
