"""Steps predicted from links that the bench measures, beside the steps that it takes: a table of networks of namespaces.

    python -m docs.results.cells FOLDER            # on a machine that does nothing else; all took 13 minutes
    python -m docs.results.cells FOLDER --only 4-hosts-100mbit-delay-10ms

Each network is made by `jobs/bench/net.sh`, of which FOLDER keeps one document. Those that are there are not measured again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from docs.results.replayed import rows
from jobs.render.chart import title_of
from oktopk.replay.links import read
from oktopk.replay.prediction import predict
from oktopk.replay.recording import Step
from oktopk.settings import Settings

ROOT = Path(__file__).parents[2]
NETWORKS = (
    (4, "100mbit", ()),
    (4, "1gbit", ()),
    (8, "100mbit", ("--queue", "400ms")),
    (16, "100mbit", ("--queue", "400ms")),
    (8, "100mbit", ()),
    (16, "100mbit", ()),
    (4, "100mbit", ("--delay", "1ms")),
    (4, "100mbit", ("--delay", "10ms")),
)
"""Hosts of one rank, their rate, and more options of `net.sh`. Queues of 50 ms drop packets among 16 hosts."""
DENSITY = "0.05"


def name_of(hosts, rate, more):
    """Of a network and of its document."""
    return "-".join([f"{hosts}-hosts-{rate}", *(word.strip("-") for word in more)])


def measure(hosts, rate, more, path):
    """Run the bench on a network, which writes its document."""
    command = [ROOT / "jobs" / "bench" / "net.sh", "--hosts", hosts, "--ranks", hosts, "--rate", rate, *more]
    command += ["--module", "oktopk.bench", "--density", DENSITY, "--wire", "float32", "--json", path]
    subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)


def compared(path):
    """Cells of each step of a document: method, predicted ms, measured ms, difference."""
    links, cells = read(path), []
    hosts, many = len(links.hosts), links.ranks_per_host
    for step in json.loads(path.read_text(encoding="utf-8"))["steps"]:
        if step["levels"] == "-":
            continue  # the communication library's own sum
        dense = step["method"] == "dense"
        settings = Settings(
            density=step["density"],
            wire="plain" if dense else step["wire"],
            levels="auto" if dense else step["levels"],
        )
        asked = Step(step["method"], step["length"], hosts, many, settings)
        seconds = predict(asked, links.network(hosts, many), links.kernels).seconds
        off = f"{100 * (seconds / step['seconds'] - 1):.0f} %".replace("-", "−")
        times = (f"{1e3 * each:,.1f}" for each in (seconds, step["seconds"]))
        cells.append([title_of(step["method"]), *times, off])
    return cells


def main(arguments=None):
    """The command."""
    parser = argparse.ArgumentParser(prog="docs.results.cells", description="Predict steps and take them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[name_of(*each) for each in NETWORKS], help="One network alone")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    cells = []
    for network in NETWORKS:
        name = name_of(*network)
        if options.only not in (None, name):
            continue
        path = options.folder.absolute() / f"{name}.json"
        if not path.exists():
            measure(*network, path)
        cells += [[name, *row] for row in compared(path)]
    print(rows(["network", "step", "predicted, ms", "measured, ms", "off"], cells))


if __name__ == "__main__":
    main()
