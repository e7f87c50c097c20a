"""Updates of models on this rank's GPU: steps on shards, and what checks gradients; test_kinds_of_replicas.py has the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from oktopk.torch.updates.gradient_check import GradientCheck
from tests.devices import need_gpus, on_real_gpus, torch_device
from tests.replicas import OPTIMIZERS, Replicas
from tests.training import flat, gradients
from tests.updates import on_all, reference

pytestmark = pytest.mark.mpi

ON_THE_HOST = pytest.mark.long("`make test` has them in test_shard_step.py")


@pytest.fixture(params=[pytest.param("cpu", marks=ON_THE_HOST), pytest.param("cuda", marks=on_real_gpus)])
def place(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> torch.device:
    if request.param == "cuda":
        torch.cuda.set_device(torch_device("cuda", comm))
    return torch_device(request.param, comm)


def make(comm: MPI.Intracomm, place: torch.device, per_host: int, kind: Any, **settings: Any) -> Any:
    if place.type == "cuda":
        need_gpus(per_host)
    replicas = Replicas(comm, per_host, place=place)
    model = replicas.model()
    return model, replicas.wrap(model, kind, **settings)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("kind", ["adamw", "adamw foreach", "oktopk adamw", "sgd"])
def test_steps_on_shards_are_those_on_all_parameters(
    comm: MPI.Intracomm, place: torch.device, kind: str
) -> None:
    """Bit for bit; a rank keeps moments of its shard alone, on its GPU."""
    ends = []
    for steps_on in (OPTIMIZERS[kind], on_all(OPTIMIZERS[kind])):
        model, optimizer = make(comm, place, 2, steps_on)
        for step in range(5):
            gradients(model, optimizer, comm.rank, step)
            if step == 2:
                model[3].weight.grad = None
            optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        assert all(value.device.type == place.type for value in kept)
        ends.append((flat(model).tobytes(), bits(reference(optimizer)), sum(value.numel() for value in kept)))
    assert ends[0][:2] == ends[1][:2]
    few, many = (comm.allreduce(each[2]) for each in ends)
    assert few < many or comm.size == 1


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"method": "oktopk"}], ids=str)
def test_one_kernel_checks_what_torch_checks(
    comm: MPI.Intracomm,
    place: torch.device,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch does where a gradient is laid out otherwise, on one rank or all; of values, NaN, and what is written behind it."""
    begun, checks, ends, begin = list[bool](), [], list[Any](), GradientCheck.begin

    def noted(check: GradientCheck) -> Any:
        started = begin(check)
        begun.append(started is not None)
        return started

    monkeypatch.setattr(GradientCheck, "begin", noted)
    for relaid in ([], [comm.size - 1], range(comm.size)):
        model, optimizer = make(comm, place, 0, "sgd", nonfinite="skip", **settings)
        weight = model[3].weight
        for step in range(8):
            gradients(model, optimizer, comm.rank, step)
            if step == 2 and comm.rank == 0:
                weight.grad[-1, -1] = float("nan")
            if step == 4:
                weight.data[0, 0] = 5.0  # on all ranks
            if step == 5:
                model[0].weight.data = model[0].weight.data.clone()  # elsewhere
            if step == 6:
                model[0].bias.grad = None
            if comm.rank in relaid:
                weight.grad = weight.grad.t().contiguous().t()
            begun.clear()
            optimizer.step()
            checks.append(any(begun))
        with optimizer.agreed():
            assert abs(float(weight[0, 0]) - 5.0) < 1.0
        ends.append(flat(model))
        assert np.isfinite(ends[-1]).all()
    checked = [place.type == "cuda" and comm.rank not in relaid for relaid in ([], [comm.size - 1])]
    assert checks == [checked[0]] * 8 + [checked[1]] * 8 + [False] * 8
    for end in ends[1:]:
        if "clip_norm" in settings:  # clipped by a norm in float64, and in float32
            np.testing.assert_allclose(ends[0], end, rtol=1e-5, atol=1e-7)
        else:
            assert ends[0].tobytes() == end.tobytes()
