"""What every test may count on.

A test marked `@pytest.mark.mpi` takes the fixture `comm` and must hold for any number of ranks. `make test` runs it on 1 and
3 (those of jobs, and of files that import torch, on 3 alone, unless marked `also(ranks=1)`), one marked `also(ranks=8)` on 8
too; `make test-long` one marked `also(ranks=4)` on 4, and so on for 5 and 6; `make test-all` those of the library on 2, 4, 5
and 8.
`@pytest.mark.mpi(min_size=2)` skips it on fewer. Every rank runs it; it fails when it fails on any rank (see multirank.py). By
hand:

    python -m jobs.launch -n 4 -m pytest --with-mpi -m mpi tests/collectives/test_transport.py

Starting torch costs every rank about 3 s of a core: a file with tests marked `mpi` imports it at its top only
when those need it. Single-process tests of the same subject that do can live in a file of their own.

Hypothesis draws the same examples on all ranks and from run to run: no database, no deadline, seeds taken
from the test's source.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import pytest_mpi

from tests import host_cuda
from tests.outcomes import OutcomeFile

if TYPE_CHECKING:
    from mpi4py import MPI

hypothesis.settings.register_profile(
    "same_on_all_ranks",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    report_multiple_bugs=False,
    # What depends on the clock differs between ranks. Explaining traces every line, and changes no verdict.
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("same_on_all_ranks")

# Tests of a single process that start several: ranks that wait take cores from each other, so one worker runs them all, one
# job at a time, beside all other tests. They come first, so that no worker is left with them at the end.
STARTING_RANKS = (
    "tests/jobs/restart/test_faults.py",
    "tests/jobs/train/test_ranks.py",
    "tests/jobs/experiment/test_experiment.py",
    "tests/jobs/bench/test_bench.py",
    "tests/jobs/bench/test_net.py",
    "tests/oktopk/test_torchrun.py",
    "tests/test_multirank_reporting.py",
)
# Others that take 10 s or more: second, for the same reason.
LONGEST = (
    "tests/jobs/train/test_train.py",
    "tests/oktopk/doctor/test_doctor.py",
    "tests/jobs/restart/test_watchdog.py",
    "tests/oktopk/test_kernels_compile.py",
    "tests/test_examples.py",
    "tests/collectives/test_compiled.py",
)
NO_GPU = "no GPU"  # the reason that the marks of such tests give
gc.disable()  # while tests are collected: a tenth of that, in each process


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("several ranks")
    group.addoption(
        "--outcomes", metavar="FILE", help="rank 0 appends each test's state to FILE as it changes"
    )
    group.addoption(
        "--rank-patience",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="how long a rank on which a test failed waits for the others before it ends the job",
    )


def pytest_configure(config: pytest.Config) -> None:
    rank = 0
    if config.getoption("--with-mpi"):
        import collectives  # noqa: F401 - it loads the UCX that knows CUDA

        # isort: split
        # Not before: a process that started MPI must not start an mpiexec, as single-process tests do.
        from mpi4py import MPI

        from tests.multirank import OneReport

        rank = MPI.COMM_WORLD.rank
        if MPI.COMM_WORLD.size > 1:
            patience = config.getoption("--rank-patience")
            config.pluginmanager.register(OneReport(MPI.COMM_WORLD, patience), "one report")
    outcomes = config.getoption("--outcomes")
    hands_out_tests = (
        config.getoption("dist", "no") != "no"
    )  # to the workers of pytest-xdist, which note their states
    if outcomes and rank == 0 and not hands_out_tests:
        config.pluginmanager.register(OutcomeFile(outcomes), "outcome file")


def pytest_sessionstart(session: pytest.Session) -> None:
    for plugin in session.config.pluginmanager.get_plugins():
        if isinstance(plugin, pytest_mpi.MPIPlugin):
            plugin._is_testing_mpi = False  # spares every report its lines about mpi4py's build


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers that share files take those of STARTING_RANKS as one; None: workers that share otherwise do so."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class OneJobAtATime(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "starting ranks" if file in STARTING_RANKS else file

    return OneJobAtATime(config, log)


def turn(item: pytest.Item) -> int:
    """Tests of a lower number come first."""
    file = item.nodeid.partition("::")[0]
    return next((at for at, files in enumerate((STARTING_RANKS, LONGEST)) if file in files), 2)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a GPU where there is none, and on a host that stands in for GPUs all the others.

    Thousands of skips would hide the others.
    """
    if bare := [item.nodeid for item in items for mark in item.iter_markers("long") if not mark.args]:
        raise pytest.UsageError(
            f"{bare[0]}: pytest.mark.long needs a reason: what the test costs, and what `make test` has instead"
        )
    items.sort(key=turn)
    if host_cuda.installed():
        others = [item for item in items if not for_gpus(item)]
        items[:] = [item for item in items if for_gpus(item)]
        config.hook.pytest_deselected(items=others)
    left_out = [item for item in items if needs_missing_gpu(item)]
    if not left_out:
        return
    items[:] = [item for item in items if not needs_missing_gpu(item)]
    config.hook.pytest_deselected(items=left_out)
    outcomes = config.pluginmanager.get_plugin("outcome file")
    for item in left_out if outcomes else ():
        outcomes.leave_out(item.nodeid)


class Frozen:
    """How many modules were imported when objects were last kept out of garbage collections, and before tests of which file."""

    file = ""
    modules = 0
    more = 100  # modules, after which it is done again


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of garbage collections: torch and the tests are a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    Frozen.modules = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Again before each file: what wraps an optimizer would look at the reports of all tests before it.

    Not between tests of a file, whose fixtures hold modules that the library looks for among all objects.
    """
    file = item.nodeid.partition("::")[0]
    if file != Frozen.file:
        Frozen.file = file
        pytest_collection_finish()


def pytest_runtest_logfinish() -> None:
    """Again after a test that imported much, as DDP does of torch: what wraps an optimizer looks at all objects not kept out."""
    if len(sys.modules) > Frozen.modules + Frozen.more:
        pytest_collection_finish()


def for_gpus(item: pytest.Item) -> bool:
    """Whether it is only for machines with a GPU, as marks say."""
    return any(mark.kwargs.get("reason") == NO_GPU for mark in item.iter_markers("skipif"))


def needs_missing_gpu(item: pytest.Item) -> bool:
    """Whether a mark would skip it for want of a GPU."""
    return any(
        mark.args[0] is True and mark.kwargs.get("reason") == NO_GPU for mark in item.iter_markers("skipif")
    )


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A run leaves signals ignored that a test which hangs must still be ended by."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


# One grey pixel.
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636800000082008177cd72b60000000049454e44ae426082"
)


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an empty picture where no test looks at it: a page takes a second to draw. Tests marked `pictures` get real ones."""
    figure = sys.modules.get("matplotlib.figure")
    if figure is None or request.node.get_closest_marker("pictures"):
        return

    def save(self: Any, file: Any, format: str = "png", **_: Any) -> None:
        if format == "svg":
            file.write('<svg xmlns="http://www.w3.org/2000/svg"></svg>')
        else:
            Path(file).write_bytes(PIXEL)

    monkeypatch.setattr(figure.Figure, "savefig", save)


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    """All ranks of the job."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def group(comm: MPI.Intracomm) -> Iterator[Any]:
    """torch's default process group among the same ranks; while it is there, it is what `comm=None` means."""
    import torch

    from jobs.train.reduce.process_group import start_process_group, stop_process_group

    start_process_group(comm, torch.device("cpu"))
    yield torch.distributed.group.WORLD
    stop_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # torch keeps results of operations with their meshes: an equal mesh would get one whose groups are gone
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


@pytest.fixture
def nccl_group(comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group that moves device arrays by NCCL; where GPUs are on the host, by what stands for it."""
    from tests.devices import asynchronous, need_gpus, use

    if not asynchronous():
        from tests.nccl_on_host import take_the_place_of_nccl

        take_the_place_of_nccl(monkeypatch)
        return group
    need_gpus(comm.size)
    import torch.distributed as dist

    use("cuda", comm)
    return dist.new_group(backend="nccl")


@pytest.fixture(scope="module")
def transport(comm: MPI.Intracomm) -> Iterator[Any]:
    """A transport of host arrays over MPI, for all tests of a file."""
    from collectives.mpi import MpiTransport

    made = MpiTransport(comm)
    yield made
    made.close()
