"""What holds for every workload: scores, ranks, devices, runs that go on, and what does not go together."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from data import DataError
from jobs.config.file import ConfigError
from jobs.report.summary import read_runs
from jobs.train.__main__ import main
from jobs.train.placement import find_placement
from jobs.train.setup import build_workload
from jobs.train.tasks.task import Score, WorkloadError
from tests.devices import asynchronous
from tests.jobs.train.conftest import SMALL, Configured, Words
from tests.tiny_runs import forget_the_end


@pytest.mark.parametrize("name", [name for name in SMALL if name != "digits"])  # which takes a minute
def test_scores_of_ranks_add_up_to_that_of_one(name: str, configured: Configured) -> None:
    config = configured(name, "training.eval_batch_size=5")
    whole = build_workload(config, rank=0, size=1).score()
    parts = [build_workload(config, rank=rank, size=3).score() for rank in range(3)]
    loss, *counts = map(sum, zip(*map(dataclasses.astuple, parts), strict=True))
    assert Score(pytest.approx(loss, rel=1e-4), *counts) == whole
    assert whole.samples == {"vit": 898, "lstm": 9}.get(name, whole.samples) > 5


@pytest.mark.parametrize("name", SMALL)
def test_ranks_share_weights_and_no_batch(name: str, configured: Configured) -> None:
    weights, batches, draws = [], [], []
    for rank in range(2):
        workload = build_workload(configured(name), rank=rank, size=2)
        draws.append(torch.rand(4))
        weights.append(torch.cat([p.detach().flatten() for p in workload.model.parameters()]))
        batch = next(workload.batches(0))
        batches.append(batch.indices if name == "lstm" else batch[0].numpy())
    assert torch.equal(*weights)
    assert not np.array_equal(*batches)
    # dropout
    assert torch.equal(*draws) == (name not in ("bert", "gpt"))


@pytest.mark.parametrize("name", SMALL)
def test_data_too_few_are_refused_before_a_network_is_made(name: str, configured: Configured) -> None:
    impossible = {"vit": "model.patch=47", "bert": "model.vocabulary=7", "gpt": "model.vocabulary=7"}
    settings = [impossible.get(name, "model.width=0.001")]
    with pytest.raises(DataError, match=r"\d+ samples are fewer than the \d+ of one step"):
        build_workload(configured(name, "training.batch_size=100000", *settings), rank=0, size=1)
    with pytest.raises(WorkloadError):
        build_workload(configured(name, *settings), rank=0, size=1)


@pytest.mark.skipif(not asynchronous(), reason="no GPU")
@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_a_gpu_sees_the_same_batches_and_the_same_loss(name: str, configured: Configured) -> None:
    host, device = (build_workload(configured(name), rank=1, size=2) for _ in range(2))
    device.move_to(find_placement("cuda", MPI.COMM_SELF))
    for step, (left, right) in enumerate(zip(host.batches(2), device.batches(2), strict=True)):
        for field, one, other in zip(left._fields, left, right, strict=True):
            assert torch.equal(one, other.cpu()), f"{field} of step {step}"
    losses = [workload.loss(next(workload.batches(0))) for workload in (host, device)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for loss in losses:
        loss.backward()
    for (parameter, one), other in zip(host.model.named_parameters(), device.model.parameters(), strict=True):
        gradients = [p.grad.to_dense() for p in (other, one)]
        torch.testing.assert_close(gradients[0].cpu(), gradients[1], rtol=1e-2, atol=1e-4, msg=parameter)
    assert device.score().loss == pytest.approx(host.score().loss, rel=1e-3)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("vit", "data.crop=2"),
        ("bert", "model.dropout=0.1"),
        ("lstm", "data.tempo=[0.9,1.1]"),
    ],
)
def test_a_run_that_goes_on_ends_with_the_same_losses(
    tmp_path: Path, name: str, more: str, words: Words
) -> None:
    path = tmp_path / "run.h5"
    given = words(name, more, "training.steps=12", "checkpoint.every_steps=5", f"run.file={path}")

    def run() -> np.ndarray:
        assert main(given, comm=MPI.COMM_SELF) == 0
        return np.asarray(read_runs([path])[0].steps["loss"])

    whole = run()
    done = forget_the_end(path)
    assert done == 10
    assert run().tolist() == whole[done:].tolist()


REFUSED = {
    "bert": {
        "model.vocabulary=30522": r"text\.h5: a vocabulary of \d+ words, but model\.vocabulary is 30522",
        "data.name=prepared data.eval_sequences=0": "'bert' does not take data.name 'prepared'",
        "optimizer.name=adam": "bias_correction False is for adamw, not for adam",
        "schedule.name=linear schedule.warmup=2": r"a warmup of 2.0 runs is not in \[0, 1\]",
        "data.path=nowhere.h5": r"nowhere\.h5: no such file",
    },
    "gpt": {
        "data.path=TEXT": r"text\.h5: pairs of segments, .* gpt takes text .* with --contiguous",
        "model.positions=512": r"sequences of 32 tokens, but model\.positions is 512: 0 takes",
        "model.vocabulary=16384": r"a vocabulary of \d+ words, but model\.vocabulary is 16384",
        "data.name=digits data.path= data.eval_sequences=0": "'gpt' does not take data.name 'digits'",
    },
    "vit": {
        "data.resize=36": "model: image 36 is not a positive multiple of the patch's 8",
    },
    "lstm": {
        "training.channels_last=true": "channels_last is for images, not for speech",
        "model.width=0.001": r"model: width 0\.001 leaves no channel",
        "model.name=vgg16": "'vgg16' does not take data.name 'an4'",
        "data.name=digits data.path=": "'lstm' does not take data.name 'digits'",
        "data.tempo=[1.5,1.1]": r"\[1\.5, 1\.1\] is not \[least, most\] within \[0\.5, 2\]",
        "training.cuda_graph=true": "those of speech differ",
        "training.label_smoothing=0.1": "label_smoothing is for images, not for speech",
        "data.path=nowhere.h5": r"nowhere\.h5: no such file",
    },
}
"""Workload -> settings -> what is said of them."""


@pytest.mark.parametrize(
    ("name", "settings"), [(name, settings) for name, each in REFUSED.items() for settings in each]
)
def test_what_does_not_go_together_is_a_sentence(name: str, settings: str, configured: Configured) -> None:
    with pytest.raises((ConfigError, WorkloadError, DataError)) as refused:
        build_workload(configured(name, *settings.split()), rank=0, size=1)
    assert re.search(REFUSED[name][settings], str(refused.value))
    assert "\n" not in str(refused.value)
