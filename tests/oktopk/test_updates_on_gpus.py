"""Updates of models on this rank's GPU: what other tests of updates show on the host, in few cases that run there, too."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from oktopk.torch import updates
from tests.devices import get, need_gpus, on_real_gpus, torch_device
from tests.replicas import ADAMW, OPTIMIZERS, Balance, Replicas
from tests.training import flat, gradients, network, train

pytestmark = pytest.mark.mpi

KINDS = OPTIMIZERS | {
    "adamw capturable": lambda p: torch.optim.AdamW(p, **ADAMW, capturable=next(iter(p)).is_cuda)
}
ON_THE_HOST = pytest.mark.long(
    "`make test` has these guarantees in test_kinds_of_replicas.py and test_shard_step.py"
)


@pytest.fixture(params=[pytest.param("cpu", marks=ON_THE_HOST), pytest.param("cuda", marks=on_real_gpus)])
def place(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> torch.device:
    if request.param == "cuda":
        torch.cuda.set_device(torch_device("cuda", comm))
    return torch_device(request.param, comm)


def make(comm: MPI.Intracomm, place: torch.device, per_host: int, kind: str, **settings: Any) -> Any:
    if place.type == "cuda":
        need_gpus(per_host)
    model = network().to(place)
    return model, Replicas(comm, per_host).wrap(model, lambda p: KINDS[kind](list(p)), **settings)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("per_host", "kind", "settings"),
    [
        (0, "adamw", {"nonfinite": "skip"}),
        (0, "adamw foreach", {"method": "oktopk", "wire": "int4"}),
        (0, "sgd", {"every": 2}),
        (0, "adam tensor rate", {"method": "oktopk"}),
        (0, "adamw capturable", {}),
        (0, "oktopk adamw", {"wire": "int4"}),
        (2, "adamw", {"nonfinite": "skip"}),
        (2, "oktopk adamw", {"clip_norm": 0.1}),
        (2, "sgd", {"every": 2, "method": "oktopk"}),
        (3, "adamw foreach", {"wire": "int4"}),
    ],
    ids=str,
)
def test_references_are_equal_after_every_exchange_and_states_go_on_bit_for_bit(
    comm: MPI.Intracomm, place: torch.device, per_host: int, kind: str, settings: dict[str, Any]
) -> None:
    """Parameters stay where they lie, as a captured graph needs; a rank with a NaN does not step, and the others go on."""
    model, optimizer = make(comm, place, per_host, kind, **settings)
    start, addresses = flat(model), [p.data_ptr() for p in model.parameters()]
    for step in range(8):
        gradients(model, optimizer, comm.rank, step)
        if step == 2 and comm.rank == 0 and "nonfinite" in settings:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
        if (step + 1) % settings.get("every", 1) == 0:
            Replicas(comm, per_host).check_agreed(model, optimizer)
        if step == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert optimizer._reference.vector.device == next(model.parameters()).device
    assert np.isfinite(flat(model)).all() and not np.array_equal(flat(model), start)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert any(comm.allgather(bool(optimizer.reducer.gathered_residual().any())))
    again, loaded = make(comm, place, per_host, kind, **settings)
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    train(again, loaded, comm.rank, range(4, 8))
    assert flat(again).tobytes() == flat(model).tobytes()
    assert bits(loaded._reference.vector) == bits(optimizer._reference.vector)
    assert np.array_equal(get(loaded.reducer.residual), get(optimizer.reducer.residual))


@pytest.mark.parametrize(("per_host", "dtype"), [(0, torch.bfloat16), (2, torch.float32)])
def test_nothing_is_lost(
    comm: MPI.Intracomm,
    place: torch.device,
    per_host: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the optimizers changed is what the reference moved by and what residuals hold."""
    if place.type == "cuda":
        need_gpus(per_host)
    monkeypatch.setattr(updates, "is_elementwise", lambda optimizer: False)
    model: Any = network().to(place, dtype)
    replicas = Replicas(comm, per_host)
    optimizer = replicas.wrap(model, "sgd", density=0.1, local_share=0.5)
    balance = Balance(replicas, model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(31 * step + comm.rank))
        model(batch.to(place, dtype)).float().square().mean().backward()
        optimizer.step()
    balance.check()


@pytest.mark.parametrize("kind", ["adamw", "adamw foreach", "oktopk adamw", "sgd"])
def test_steps_on_shards_are_those_on_all_parameters(
    comm: MPI.Intracomm, place: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; a rank keeps moments of its shard alone, on its GPU."""
    ends = []
    for _ in range(2):
        model, optimizer = make(comm, place, 2, kind)
        for step in range(5):
            gradients(model, optimizer, comm.rank, step)
            if step == 2:
                model[3].weight.grad = None
            optimizer.step()
        kept = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        assert all(value.device.type == place.type for value in kept)
        ends.append(
            (flat(model).tobytes(), bits(optimizer._reference.vector), sum(value.numel() for value in kept))
        )
        monkeypatch.setattr(updates, "is_elementwise", lambda optimizer: False)
    assert ends[0][:2] == ends[1][:2]
    on_shards, on_all = (comm.allreduce(each[2]) for each in ends)
    assert on_shards < on_all or comm.size == 1


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"method": "oktopk"}], ids=str)
def test_one_kernel_checks_what_torch_checks(
    comm: MPI.Intracomm, place: torch.device, settings: dict[str, Any]
) -> None:
    """Torch does where a gradient is laid out otherwise, on one rank or all; of values, NaN, and what is written behind it."""
    checks, ends = [], []
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
            optimizer.step()
            checks.append(optimizer._check is not None and optimizer._check.begin() is not None)
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
