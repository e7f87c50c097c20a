"""The Vision Transformer: the published size, and outputs that train."""

import math

import pytest
import torch
from torch import nn

from models import ViT

SMALL = {"layers": 2, "hidden": 64, "patch": 8, "image": 16}


def test_large_with_patches_of_32_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = ViT(layers=24, hidden=1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == 306_535_400


def test_a_seed_fixes_the_weights_and_the_first_loss_is_that_of_equal_probabilities() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(ViT(10, **SMALL))
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)
    scores = models[0](torch.randn(20, 3, 16, 16))
    assert scores.shape == (20, 10)
    loss = nn.functional.cross_entropy(scores, torch.arange(20) % 10)
    assert loss.item() == pytest.approx(math.log(10), abs=0.3)


def test_every_parameter_gets_a_gradient_and_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    model = ViT(10, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    images, labels = torch.randn(20, 3, 16, 16), torch.arange(20) % 10
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), (
                name
            )
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_what_is_written_for_an_image_does_not_depend_on_the_others_and_does_on_its_patches_order() -> None:
    torch.manual_seed(0)
    model = ViT(4, in_channels=1, **SMALL)
    images = torch.randn(3, 1, 16, 16)
    assert torch.allclose(model(images)[1], model(images[1:2])[0], atol=1e-6)
    assert not torch.allclose(model(images), model(images.flip(2)), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (2, 3, 32, 32), (2, 1, 16, 16), (3, 16, 16)])
def test_images_of_another_shape_are_refused_with_their_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images of shape \(.*\) are not \[batch, 3, 16, 16\]"):
        ViT(10, **SMALL)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes 0 is not at least 1"),
        ({"layers": 0}, "layers 0 is not at least 1"),
        ({"patch": 0}, "patch 0 is not at least 1"),
        ({"in_channels": 0}, "in_channels 0 is not at least 1"),
        ({"hidden": 100}, "hidden 100 is not a positive multiple of 64"),
        ({"image": 100}, "image 100 is not a positive multiple of the patch's 32 pixels"),
        ({"image": 0}, "image 0 is not a positive multiple"),
    ],
)
def test_impossible_sizes_are_refused_with_their_value(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViT(**arguments)
