"""A network of one's own: model.factory trains on each kind of data, and one that cannot ends every rank with a sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import nn

from data.prepare import main as prepare
from data.text.file import open_text_file
from jobs.config.file import load
from jobs.run.reader import RunReader
from jobs.train.__main__ import main
from jobs.train.setup import build_workload
from jobs.train.tasks.task import WorkloadError
from tests.documents import write_documents
from tests.launched import PATIENCE, outcome
from tests.networks import Text
from tests.utterances import write_an4

CONFIG = Path(__file__).parents[3] / "jobs" / "configs" / "digits.toml"


def overrides(factory: str, *more: str) -> list[str]:
    return ["model.name=own", "model.width=1.0", f"model.factory={factory}", "training.steps=3", *more]


def problem(factory: str, *more: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        build_workload(load(CONFIG, overrides(factory, *more)), rank=0, size=1)
    return str(caught.value)


def test_the_factory_gets_its_arguments_and_equal_weights() -> None:
    config = load(CONFIG, overrides("tests.networks:digits", "model.arguments={hidden = 7, biased = false}"))
    models = [build_workload(config, rank=rank, size=2).model for rank in (0, 1)]
    layer = models[0][1]
    assert isinstance(layer, nn.Linear)
    assert layer.out_features == 7 and not [*layer.named_parameters()][1:]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("factory", "more", "sentence"),
    [
        (
            "tests.no_networks:digits",
            [],
            "No module named 'tests.no_networks': put the folder that holds tests on PYTHONPATH, or",
        ),
        ("tests.networks:letters", [], "module 'tests.networks' has no attribute 'letters'"),
        ("tests.networks:SETTINGS", [], "is a dict, which cannot be called"),
        (
            "tests.networks:digits",
            [],
            "do not fit 'tests.networks:digits': missing a required argument: 'hidden'",
        ),
        ("tests.networks:digits", ["model.arguments.colour=3"], "missing a required argument: 'hidden'"),
        ("tests.networks:speech", ["model.arguments.width=3"], "got an unexpected keyword argument 'width'"),
        ("tests.networks:digits", ["model.arguments.hidden=0"], "hidden 0 is not at least 1"),
        ("tests.networks:not_a_network", [], "returned a list, not a torch.nn.Module"),
        ("tests.networks:without_parameters", [], "returned a network without parameters to train"),
    ],
)
def test_a_factory_that_makes_no_network_is_named(factory: str, more: list[str], sentence: str) -> None:
    found = problem(factory, *more)
    assert found.startswith(("model.factory", "model.arguments"))
    assert sentence in found
    assert "\n" not in found


def test_an_error_inside_the_users_module_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "networks_of_a_user.py").write_text("def build():\n    return undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(NameError, match="undefined_name"):
            build_workload(load(CONFIG, overrides("networks_of_a_user:build")), rank=0, size=1)
    finally:
        sys.modules.pop("networks_of_a_user", None)


def test_ones_own_network_trains_on_speech_and_on_text(tmp_path: Path) -> None:
    write_an4(tmp_path / "an4", ["AB", "BA", "CAB", "ABBA"] * 2, ["AB", "BA"])
    assert prepare(["an4", str(tmp_path / "an4"), "-o", str(tmp_path / "an4.h5"), "--partial"]) == 0
    text = write_documents(tmp_path)
    words = len(open_text_file(text)[0].vocabulary)
    for name, path, factory in (
        ("an4", tmp_path / "an4.h5", ["tests.networks:speech"]),
        ("text", text, ["tests.networks:Text", f"model.arguments.words={words}"]),
    ):
        settings = [f"data.name={name}", f"data.path={path}", "training.batch_size=2"]
        config = load(CONFIG, overrides(*factory, *settings))
        workload = build_workload(config, rank=0, size=1)
        loss = workload.loss(next(workload.batches(0)))
        loss.backward()
        assert torch.isfinite(loss)
        assert isinstance(workload.model, Text) == (name == "text")
        assert workload.score().samples > 0


@pytest.mark.mpi
@pytest.mark.timeout(PATIENCE)
def test_ones_own_network_trains_on_every_rank(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder: Path = comm.bcast(tmp_path)

    def train(path: Path, *settings: str) -> tuple[int, str]:
        words = [str(CONFIG), "--set", *settings, f"run.file={path}"]
        return outcome(comm, lambda: main(words, comm=comm))

    small = ["model.arguments.hidden=8", "training.batch_size=4"]
    status, printed = train(folder / "own.h5", *overrides("tests.networks:digits", *small))
    assert status == 0, printed
    if comm.rank == 0:
        with RunReader(folder / "own.h5") as reader:
            assert reader.config["model"]["factory"] == "tests.networks:digits"
            assert (reader.status, len(reader.steps()["step"])) == ("complete", 3)
    status, printed = train(folder / "none.h5", *overrides("tests.networks:not_a_network"))
    assert status == 2
    said = comm.bcast(printed.strip())
    assert re.fullmatch(r"jobs\.train: model\.factory .* returned a list, not a torch\.nn\.Module", said)


@pytest.mark.mpi
def test_the_configuration_is_shown_once_and_every_rank_leaves(
    comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(comm, lambda: main(["--show-config"], comm=comm)) == (0, "")
    assert ("[reduction]" in capsys.readouterr().out) == (comm.rank == 0)
    for words, sentence in (
        ([], "CONFIG.toml is missing"),
        (["--show-config", "--set", "run.fil=x"], "did you mean file?"),
    ):
        status, printed = outcome(comm, lambda words=words: main(words, comm=comm))  # type: ignore[misc]
        assert status == 2
        assert sentence in printed
