"""The bench over a slow network: says what is missing, measures, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from mpi4py import MPI

from jobs.bench.document import read
from oktopk.launch import launch_environment

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "jobs" / "bench" / "net.sh"
PATIENCE = 100
# A length that no other job has, to be found among the processes.
TINY = ["--length", "20011", "--steps", "9", "--warmup", "9", "--set", "threshold_interval=8"]


def command(*words: str) -> list[str]:
    return [str(shutil.which("bash")), str(SCRIPT), "--python", sys.executable, *words]


def call(words: Sequence[str], path: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = launch_environment(1, "unknown") | variables
    if path is not None:
        environment["PATH"] = path
    return subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE - 5,
        check=False,
    )


def processes(words: str) -> list[str]:
    """Command lines of all processes of the machine that contain the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line:
            found.append(line)
    return found


def ranks() -> list[str]:
    return [line for line in processes("--length 20011") if line.startswith(f"{sys.executable} -m mpi4py")]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def networks() -> None:
    """Skips where this kernel or this machine has no namespaces to offer."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for tool in ("ip", "tc", "unshare", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    probe = (
        "ip link add name probe type bridge && ip link add name probe1 type veth peer name probe2 "
        "&& tc qdisc add dev probe1 root tbf rate 1gbit burst 128kb latency 50ms"
    )
    made = call(["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe])
    if made.returncode:
        pytest.skip(f"no namespaces, bridge, veth or tbf here: {made.stderr.strip()}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast"], "--rate fast is not a rate such as 1gbit or 100mbit, nor none"),
        (["--device", "abacus"], "--device abacus is neither cpu nor cuda"),
        (["--burst", "much"], "--burst much is not a number of bytes such as 128kb"),
        (["--queue", "long"], "--queue long is not a time such as 50ms"),
        (["--mtu", "jumbo"], "--mtu jumbo is not a number of bytes in [100, 99999]"),
        (["--delay", "long"], "--delay long is not a time such as 10ms"),
        (["--gpus", "0,1"], "--transport and --gpus are for --device cuda"),
        (["--transport", "ucx"], "--transport and --gpus are for --device cuda"),
        (["--device", "cuda", "--transport", "rdma"], "--transport rdma is neither tcp nor ucx"),
        (["--device", "cuda", "--gpus", "0;1"], "--gpus 0;1 is not a list of numbers such as 0,1"),
        (
            ["--device", "cuda", "--gpus", "0,1", "--hosts", "3"],
            "GPU(s) 0,1 are fewer than 3 hosts, each of which has its own: try --hosts 2",
        ),
        (
            ["--device", "cuda", "--gpus", "0,1", "--ranks", "3"],
            "3 ranks are not the same number on each of 2 hosts",
        ),
        (
            ["--quiet", "--device", "cuda"],
            "--device goes before the arguments of the bench: it makes the hosts",
        ),
        (["--hosts", "0"], "--hosts 0 is not a number in [1, 99]"),
        (["--ranks", "x"], "--ranks x is not a number of at least 1"),
        (["--ranks", "3"], "3 ranks are fewer than 4 hosts: try --hosts 3"),
        (["--rate"], "--rate needs a value"),
        (["--launcher", "ssh"], "--launcher ssh is neither mpiexec nor torchrun"),
        (
            ["--launcher", "torchrun", "--module", "x", "--transport", "tcp"],
            "--transport and --mpiexec are for --launcher mpiexec",
        ),
        (["--launcher", "torchrun"], "--launcher torchrun needs --module: jobs.bench runs over MPI"),
        (
            ["--launcher", "torchrun", "--module", "x", "--hosts", "2", "--ranks", "3"],
            "3 ranks are not the same number on each of 2 hosts",
        ),
    ],
)
def test_bad_arguments_are_refused(words: list[str], message: str) -> None:
    done = call(command(*words))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"bench-net: {message}\n")


def test_without_gpus_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    found = f"{tmp_path}:{os.environ['PATH']}"
    done = call(command("--device", "cuda"), path=found, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert (
        done.stderr
        == "bench-net: --device cuda needs GPUs, and nvidia-smi lists none: name them by --gpus 0,1\n"
    )
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    done = call(command("--device", "cuda", "--hosts", "4"), path=found, CUDA_VISIBLE_DEVICES="")
    assert "GPU(s) 0,1 are fewer than 4 hosts" in done.stderr


SEEN = """
import os, socket
from mpi4py import MPI
names = "CUDA_VISIBLE_DEVICES", "OKTOPK_CUDA_AWARE_MPI", "OMPI_MCA_pml", "NCCL_SOCKET_IFNAME", "UCX_TLS", "OMPI_MCA_plm"
seen = socket.gethostname(), *(os.environ.get(name) for name in names)
with open("/sys/class/net/eth0/mtu") as packet:
    seen = *seen, packet.read().strip()
for one in MPI.COMM_WORLD.gather(seen) or []:
    print(*one)
"""


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    ("transport", "more", "expected"),
    [
        ("tcp", ["--mtu", "9000"], "0 ob1 eth0 None None 9000"),
        ("ucx", [], "None ucx eth0 tcp,self,cuda_copy None 1500"),
    ],
)
def test_each_host_has_its_own_gpus_and_packets(
    networks: None, tmp_path: Path, transport: str, more: list[str], expected: str
) -> None:
    if "Open MPI" not in MPI.Get_library_version():
        pytest.skip("needs Open MPI")
    (tmp_path / "seen_by_ranks.py").write_text(SEEN)
    words = ["--device", "cuda", "--gpus", "4,5,6,7", "--ranks", "4", "--transport", transport, *more]
    done = call(
        command(*words, "--module", "seen_by_ranks"),
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        OMPI_MCA_plm="left by this machine's own MPI",
    )
    assert done.returncode == 0, done.stderr
    # UCX warns that it finds no CUDA where there is none
    seen = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    # consecutive ranks share a host
    assert seen == 2 * [f"h1 4,5 {expected}"] + 2 * [f"h2 6,7 {expected}"]
    assert "2 hosts at 10gbit, 4 ranks, openmpi" in done.stderr


@needs_root
@pytest.mark.parametrize(
    ("user", "message"),
    [("65534", "needs root, or a system that lets users make namespaces; "), ("0", "does not let root make")],
)
def test_without_namespaces_it_says_so(user: str, message: str) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs setpriv, ip and tc")
    # the checkout and its interpreter may lie where only root can read
    script = f"unshare() {{ echo no namespaces today >&2; return 1; }}\n{SCRIPT.read_text()}"
    run = ["bash", "-c", script, "net.sh", "--python", "/bin/sh"]
    done = call([setpriv, "--reuid", user, "--clear-groups", *run])
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.rstrip().endswith("no namespaces today")


@needs_root
def test_without_its_tools_it_names_their_packages(tmp_path: Path) -> None:
    for tool in ("bash", "id", "uname", "dirname", "mount"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    done = call(command(), path=str(tmp_path))
    assert done.returncode == 2
    assert "not installed: iproute2 (ip, tc) util-linux (unshare, setpriv). On Debian" in done.stderr


def test_help_is_the_head_of_the_script() -> None:
    done = call(command("--help"))
    assert done.returncode == 0
    assert done.stdout.startswith("The bench over real TCP on a slow network")
    assert "jobs/bench/net.sh [--hosts 4]" in done.stdout


@needs_root
def test_without_an_environment_it_says_how_to_make_one() -> None:
    done = call(command("--python", "/nowhere/python"))
    assert done.returncode == 2
    assert "/nowhere/python is no interpreter: `make setup` makes .venv" in done.stderr


@pytest.mark.timeout(PATIENCE)
def test_a_bench_over_tcp_takes_mpis_algorithm_from_outside(networks: None, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    words = [*TINY, "--dense-steps", "2", "--json", str(path)]
    ring = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
    done = call(command("--hosts", "2", "--rate", "1gbit", *words), **ring)
    assert done.returncode == 0, done.stderr
    content = read(path)
    (entry,) = content["runs"]
    assert entry["ranks"] == 2
    assert entry["network"] == "2 hosts, TCP over 1gbit links"
    names = [method["name"] for method in entry["methods"]]
    assert {"dense", "oktopk", "mpi"} <= set(names)
    if "Open MPI" in content["mpi"]:
        assert content["environment"]["OMPI_MCA_coll_tuned_allreduce_algorithm"] == "4"
    assert not processes("--length 20011")


@pytest.mark.timeout(PATIENCE)
def test_ranks_that_do_not_divide_leave_no_host_empty(networks: None, tmp_path: Path) -> None:
    (tmp_path / "seen_by_ranks.py").write_text(SEEN)
    words = ["--hosts", "4", "--ranks", "6", "--rate", "none", "--module", "seen_by_ranks"]
    done = call(command(*words), PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "4 hosts at none, 6 ranks" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["h1", "h1", "h2", "h2", "h3", "h4"]


OF_TORCHRUN = """
import os, socket, sys, time
words = os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], socket.gethostname(), sys.argv[1]
os.write(1, (" ".join(words) + "\\n").encode())  # whole, beside those of other ranks
if sys.argv[1] == "fail":
    time.sleep(0 if os.environ["RANK"] == "3" else 600)
    sys.exit(3)
"""


@pytest.mark.long("torchrun starts torch on each host")
@pytest.mark.timeout(PATIENCE)
def test_torchrun_starts_ranks_on_each_host(networks: None, tmp_path: Path) -> None:
    (tmp_path / "of_torchrun.py").write_text(OF_TORCHRUN)
    words = ["--hosts", "2", "--ranks", "4", "--launcher", "torchrun", "--module", "of_torchrun"]
    done = call(command(*words, "two words"), PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, done.stderr
    lines = [f"{rank} {rank % 2} 4 h{1 + rank // 2} two words" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == lines
    assert call(command(*words, "fail"), PYTHONPATH=f"{ROOT}:{tmp_path}").returncode == 1


@pytest.mark.long(
    "four ranks start torch; `make test` has hosts of two ranks, unshaped links and a bench over shaped ones"
)
@pytest.mark.timeout(PATIENCE)
def test_unshaped_links_of_hosts_with_two_ranks(networks: None, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    words = ["--hosts", "2", "--ranks", "4", "--rate", "none", *TINY, "--dense-steps", "9"]
    done = call(command(*words, "--methods", "oktopk-flat-plain,oktopk-hosts-int4", "--json", str(path)))
    assert done.returncode == 0, done.stderr
    (entry,) = read(path)["runs"]
    assert entry["network"] == "2 hosts, TCP over unshaped links"
    assert entry["ranks"] == 4
    flat, hosts = (method["bytes_between"]["mean"] for method in entry["methods"])
    assert 0 < hosts < 0.5 * flat


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(
            signal.SIGTERM, marks=pytest.mark.long("`make test` has SIGINT, which is trapped alike")
        ),
        signal.SIGKILL,
    ],
)
def test_whatever_ends_it_nothing_is_left(networks: None, number: signal.Signals) -> None:
    before = call(["ip", "-o", "link"]).stdout.count("\n"), call(["ip", "netns", "list"]).stdout
    # longer than any patience
    words = ["--hosts", "2", "--length", "20011", "--steps", "10000000", "--methods", "oktopk", "--quiet"]
    with subprocess.Popen(
        command(*words),
        env=launch_environment(1, "unknown"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a shell that was born ignoring SIGINT, as in the background of another, cannot trap it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - before bash, not Python
    ) as job:
        deadline = time.monotonic() + 60
        while len(ranks()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(ranks()) == 2
        time.sleep(0.5)  # into the measuring
        job.send_signal(number)
        try:
            assert job.wait(timeout=10) in (128 + number, -number)
        finally:
            job.kill()
    deadline = time.monotonic() + 10
    while processes("--length 20011") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes("--length 20011")
    assert (call(["ip", "-o", "link"]).stdout.count("\n"), call(["ip", "netns", "list"]).stdout) == before
