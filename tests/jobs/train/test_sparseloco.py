"""SparseLoCo as a mode of training: what is sent, what is kept, what ranks agree on, and a state that goes on bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from mpi4py import MPI

from jobs.train.reduce.sparseloco import CHUNK, CODED, DECAY, KEPT, SparseLocoTraining, decode, encode
from oktopk.elastic import redistribute
from tests.jobs.train.test_baselines import EVERY, backward, flat, network, sparseloco, steps


def test_a_chunks_largest_travel_with_sign_and_magnitude() -> None:
    drawn = torch.Generator().manual_seed(3)
    chunks = torch.randn(5, CHUNK, generator=drawn)
    chunks[3] = 0.0
    chunks[4, : CHUNK - 30] = 0.0  # fewer than are sent
    coded = encode(chunks)
    assert (coded.dtype, coded.shape, CODED) == (torch.uint8, (5, CODED), 116)
    indices, values = decode(coded)
    for chunk, found, value in zip(chunks, indices, values, strict=True):
        assert len(set(found.tolist())) == KEPT
        sent = chunk[found]
        assert sorted(sent.abs().tolist()) == sorted(chunk.abs().topk(KEPT).values.tolist())
        large = sent.abs() > sent.abs().mean()
        for part in (large, ~large):
            expected = sent[part].abs().mean().nan_to_num().expand(int(part.sum()))
            torch.testing.assert_close(value[part].abs(), expected, rtol=2**-8, atol=0.0)
        assert (value * sent >= 0).all()


@pytest.mark.mpi
def test_nothing_is_lost_and_ranks_agree_after_an_exchange(gloo: MPI.Intracomm) -> None:
    model = network()
    training = sparseloco(model, gloo.size)
    before = torch.from_numpy(flat(model))
    kept = torch.zeros(training.length)
    for first in range(0, 4 * EVERY, EVERY):
        assert steps(training, gloo.rank, range(first, first + EVERY - 1), model) == [0] * (EVERY - 1)
        assert gloo.size == 1 or len(set(gloo.allgather(flat(model).tobytes()))) > 1
        with training.agreed():
            assert flat(model).tobytes() == before.numpy().tobytes()
        # the last local step, by itself
        apart = network()
        apart.load_state_dict(model.state_dict())
        alone = sparseloco(apart, gloo.size)
        alone.inner.load_state_dict(copy.deepcopy(training.inner.state_dict()))
        backward(apart, gloo.rank, first + EVERY - 1)
        alone.inner.step()
        changed = torch.from_numpy(flat(apart)) - before
        (words,) = steps(training, gloo.rank, range(first + EVERY - 1, first + EVERY), model)
        assert 4 * words == (gloo.size - 1) * CODED * -(-training.length // CHUNK)
        residual = training.state_dict()["reducer"]["residual"]
        sent = gloo.allreduce((DECAY * kept + changed - residual).double().numpy()) / gloo.size
        after = torch.from_numpy(flat(model))
        torch.testing.assert_close(after - before, torch.from_numpy(sent).float(), rtol=1e-4, atol=1e-6)
        assert len(set(gloo.allgather(flat(model).tobytes()))) == 1
        assert residual.abs().max() > 0 and (after != before).sum() <= KEPT * gloo.size
        kept, before = residual.clone(), after


@pytest.mark.mpi
def test_a_ranks_own_gradient_is_clipped(gloo: MPI.Intracomm) -> None:
    model, plain = network(), network()
    training = SparseLocoTraining(torch.optim.SGD(model.parameters(), lr=1.0), 0.125, gloo.size, EVERY)
    steps(training, gloo.rank, range(1), model)
    assert torch.from_numpy(flat(model) - flat(plain)).norm().item() == pytest.approx(0.125, rel=1e-3)


@pytest.mark.mpi
def test_other_ranks_start_from_what_all_had_agreed_on(gloo: MPI.Intracomm) -> None:
    model, resumed_model = network(), network()
    training, resumed = (sparseloco(each, gloo.size) for each in (model, resumed_model))
    steps(training, gloo.rank, range(EVERY + 1), model)
    saved = gloo.allgather(training.state_dict()["reducer"])
    more = redistribute(lambda rank: saved[rank], gloo.size, gloo.rank, gloo.size + 1)
    resumed.load_state_dict({**training.inner.state_dict(), "reducer": more})
    with training.agreed():
        assert flat(resumed_model).tobytes() == flat(model).tobytes()
