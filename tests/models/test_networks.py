"""All networks: the published sizes, weights that a seed fixes, and gradients of every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from models import BERT, GPT, LSTM, VGG16, ViT

Network = Callable[..., nn.Module]


@pytest.mark.parametrize(
    ("network", "arguments", "count"),
    [
        (VGG16, {}, 14_728_266),
        (VGG16, {"width": 0.25}, 924_186),
        (VGG16, {"classes": 4, "width": 0.125, "in_channels": 1}, 231_740),
        (LSTM, {}, 27_569_568),
        (BERT, {}, 133_547_324),
        (ViT, {"layers": 24, "hidden": 1024}, 306_535_400),
        (GPT, {"layers": 4, "hidden": 192}, 5_023_872),
        (GPT, {}, 17_135_616),
        (GPT, {"layers": 12, "hidden": 768}, 98_032_128),
    ],
)
def test_networks_have_the_published_number_of_parameters(
    network: Network, arguments: dict[str, float], count: int
) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in network(**arguments).parameters()) == count


CLASSES = torch.arange(20) % 10


def images_loss(model: nn.Module, size: int = 32) -> torch.Tensor:
    scores = model(torch.randn(20, 3, size, size))
    assert scores.shape == (20, 10)
    return nn.functional.cross_entropy(scores, CLASSES)


def speech_loss(model: nn.Module) -> torch.Tensor:
    lengths = torch.tensor([30, 28, 24, 22])
    logits, outputs = model(torch.randn(4, 161, 30), lengths)
    targets, sizes = torch.randint(1, 10, (4, 5)), torch.tensor([5, 4, 5, 3])
    return nn.functional.ctc_loss(logits.log_softmax(2).transpose(0, 1), targets, outputs, sizes)


def text_loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 10, (20, 12))
    segments = (torch.arange(12) >= 7).long().expand(20, -1)
    words, follows = model(
        tokens, segments, torch.ones_like(tokens, dtype=torch.bool), torch.full((20, 1), 4)
    )
    return nn.functional.cross_entropy(words[:, 0], CLASSES) + nn.functional.cross_entropy(
        follows, CLASSES % 2
    )


def next_token_loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 10, (20, 12)).sort(1).values
    scores = model(tokens)
    assert scores.shape == (20, 12, 10)
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor], float]] = {
    "vgg16": (lambda: VGG16(width=0.0625), images_loss, math.log(10)),
    "lstm": (lambda: LSTM(labels=10, width=0.0625), speech_loss, math.nan),
    "bert": (
        lambda: BERT(10, layers=2, hidden=64, dropout=0.0, positions=16),
        text_loss,
        math.log(10) + math.log(2),
    ),
    "gpt": (lambda: GPT(10, layers=2, hidden=64, positions=12), next_token_loss, math.log(10)),
    "vit": (
        lambda: ViT(10, layers=2, hidden=64, patch=8, image=16),
        partial(images_loss, size=16),
        math.log(10),
    ),
}
"""A small network, its loss on random inputs, and that of equal probabilities."""


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_learns_and_a_seed_fixes_weights(name: str) -> None:
    make, loss_of, chance = SMALL[name]
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(make())
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)
    model, losses = models[0].train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(8):
        torch.manual_seed(1)
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        for parameter, tensor in model.named_parameters():
            assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any(), parameter
        optimizer.step()
        losses.append(loss.item())
    assert math.isnan(chance) or losses[0] == pytest.approx(chance, abs=0.3)
    assert losses[-1] < 0.8 * losses[0]


def test_vgg_scales_channels_and_takes_larger_images() -> None:
    for width, channels in ((0.125, [8, 32, 64, 64]), (1 / 64, [1, 4, 8, 8])):  # rounded to whole ones
        model = VGG16(width=width)
        convolutions = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
        assert (len(convolutions), convolutions[::4]) == (13, channels)
        for shape in ((1, 3, 32, 32), (2, 3, 64, 96)):
            assert model(torch.zeros(shape)).shape == (shape[0], 10)


def test_vits_scores_depend_on_the_order_of_patches() -> None:
    torch.manual_seed(0)
    model = ViT(4, in_channels=1, layers=2, hidden=64, patch=8, image=16)
    images = torch.randn(3, 1, 16, 16)
    assert torch.allclose(model(images)[1], model(images[1:2])[0], atol=1e-6)
    assert not torch.allclose(model(images), model(images.flip(2)), atol=1e-6)


def test_gpts_scores_depend_on_earlier_tokens_alone() -> None:
    model, tokens = SMALL["gpt"][0](), torch.arange(12)[None] % 10
    scores = model(tokens)
    changed = tokens.clone()
    changed[0, 7] = 9
    torch.testing.assert_close(model(changed)[:, :7], scores[:, :7])
    torch.testing.assert_close(model(tokens[:, :7]), scores[:, :7])
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    for other in (changed, swapped):
        assert not torch.allclose(model(other)[:, 7:], scores[:, 7:], atol=1e-6)
    # the embedding decodes: a word that is no input learns, too
    model(torch.zeros(1, 12, dtype=torch.long)).logsumexp(2).sum().backward()
    assert model.tokens.weight.grad.any(1).all()
