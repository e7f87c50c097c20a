"""`oktopk-doctor --hosts`: links in short, and the plan's own word on whether sparse steps pay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from oktopk.bench.__main__ import ALONE
from oktopk.doctor import hosts
from oktopk.doctor.__main__ import main
from oktopk.plan.__main__ import main as plan
from oktopk.replay.links import LinksError, read
from tests.links import MODEL, document, write

VERDICT = r"^Sparse steps (?:do not )?pay here: .* times as fast as .*"


@pytest.mark.parametrize("driver", [False, True])
@pytest.mark.parametrize(("per_byte", "word"), [(8e-10, "pay"), (1e-12, "do not pay")])
def test_the_doctor_says_what_a_plan_says(
    driver: bool,
    per_byte: float,
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "has_driver", lambda: driver)
    between = {"latency": 1e-5, "model": MODEL | {"G": per_byte}, "sizes": []}
    made = document(3, 1, kernels=None, between=between)
    path = write(tmp_path / "links.json", made)
    assert plan([str(path), "--parameters", "98e6", "--compute-ms", "90", "--hosts", "3"]) == 0
    judged = hosts.judged(made, 98_000_000, 0.09)
    assert ("GPUs of one host have faster ones" in judged) == driver
    said = re.search(VERDICT, judged, re.DOTALL | re.MULTILINE)
    assert said and said[0] in capsys.readouterr().out
    assert said[0].startswith(f"Sparse steps {word} here: ")


def test_one_slow_link_is_named() -> None:
    made = document(4, 1)
    made["pairs"][2]["bytes_per_second"] = 1e8
    with pytest.raises(
        LinksError, match="^the link between node1 and node4 carries 100 MB/s, less than"
    ) as caught:
        hosts.judged(made, 98_000_000, 0.09)
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], ALONE),
        (["--parameters", "0"], "--parameters 0 is not in [1, 2147483647], which one exchange takes"),
        (["--compute-ms", "-1"], "--compute-ms -1 is not a time in [0, 1e9)"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--hosts", *words]) == 2
    assert capsys.readouterr() == ("", f"oktopk-doctor: {sentence}\n")


@pytest.mark.mpi(min_size=2)
def test_links_between_the_ranks_of_a_job_are_measured_and_judged(
    comm: MPI.Intracomm,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "_SECONDS", 0.2)
    path = Path(comm.bcast(str(tmp_path_factory.mktemp("hosts") / "links.json")))
    assert main(["--hosts", "--json", str(path), "--parameters", "1e6", "--compute-ms", "1"]) == 0
    shown = capsys.readouterr().out
    assert bool(re.search(VERDICT, shown, re.DOTALL | re.MULTILINE)) == (comm.rank == 0)
    comm.Barrier()
    links = read(path)
    assert (len(links.hosts), links.ranks_per_host, links.kernels) == (1, comm.size, None)
