"""docs/results/updates/sparseloco.py: what a rank sends is what the others read."""

from __future__ import annotations

import importlib
from typing import Any

import torch

script: Any = importlib.import_module("docs.results.updates.sparseloco")  # a script without types


def test_sparseloco_sends_the_largest_of_a_chunk_with_their_signs() -> None:
    chunks = torch.randn(3, script.CHUNK, generator=torch.Generator().manual_seed(0))
    chunks[1] *= 1e-6
    chunks[2] = 0.0
    chunks[2, 5] = -3.0
    coded = script.encode(chunks)
    assert coded.shape == (3, script.CODED) and coded.dtype == torch.uint8
    indices, values = script.decode(coded)
    for chunk, places, sent in zip(chunks, indices, values, strict=True):
        assert len(set(places.tolist())) == script.KEPT
        own = chunk[places]
        assert own.abs().min() >= chunk.abs().sort(descending=True).values[script.KEPT - 1]
        assert torch.equal(sent.sign()[own != 0], own.sign()[own != 0])
        large = own.abs() > own.abs().mean()
        for part in (large, ~large):
            assert torch.allclose(sent[part].abs(), own[part].abs().mean(), rtol=2**-8)
