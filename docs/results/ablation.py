"""Ok-Topk as it is, and with one of its ideas taken away at a time, on gradients whose large entries lie together.

    python -m jobs.launch -n 8 -m docs.results.ablation --length 2000000 --steps 33 --warmup 60 --json FILE
    jobs/bench/net.sh --module docs.results.ablation --json FILE

It takes the options of jobs.bench, but for --methods.
"""

import math
import sys
from dataclasses import replace
from functools import partial

from mpi4py import MPI

from jobs.bench.document import BenchError
from jobs.bench.measure import Contestant
from jobs.bench.options import parse
from jobs.bench.run import measure_run, run_all
from jobs.cluster.agreement import say
from jobs.restart.signals import leave


def variants(ranks):
    """The contestants, first the one as it is."""
    settings = {
        "full": {},
        "uniform regions": {"balanced_regions": False},
        "no rotation": {"rotate": False},
        "bucket of 1": {"bucket_rounds": 1},
        f"bucket of {max(1, ranks - 1)}, all": {"bucket_rounds": max(1, ranks - 1)},
        "balance at 1.0": {"balance_trigger": 1.0},
        "balance off": {"balance_trigger": math.inf},
        "uniform, balance at 1.0": {"balanced_regions": False, "balance_trigger": 1.0},
        "uniform, balance off": {"balanced_regions": False, "balance_trigger": math.inf},
        "neither, no rotation": {"balanced_regions": False, "balance_trigger": math.inf, "rotate": False},
    }
    return [Contestant(name=name, method="oktopk", settings=changes) for name, changes in settings.items()]


def main(words, module="docs.results.ablation", comm=MPI.COMM_WORLD):
    """Measure as the command line says; returns the exit status."""
    if {"-h", "--help"} & {*words}:
        say(comm, __doc__)
        return 0
    try:
        if comm.size == 1:
            raise BenchError("one rank sends nothing: start two or more")
        options = replace(parse(["--methods", "oktopk", "--gradients", "clustered", *words]), module=module)
        if options.methods != ("oktopk",):
            raise BenchError(f"settings of oktopk are compared, not methods {', '.join(options.methods)}")
    except BenchError as error:
        say(comm, f"{module}: {error}")
        return 2
    each = [replace(options, lengths=(length,)) for length in options.lengths]
    measures = [partial(measure_run, own, comm, variants(comm.size)) for own in each]
    return run_all(lambda: ("ablation", measures), options, comm)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
