"""VGG-16: the published size, and outputs that train."""

import math

import pytest
import torch
from torch import nn

from models import VGG16


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_full_width_has_the_published_number_of_parameters() -> None:
    assert parameters(VGG16()) == 14_728_266


@pytest.mark.parametrize(
    ("classes", "width", "in_channels", "count"), [(10, 0.25, 3, 924_186), (4, 0.125, 1, 231_740)]
)
def test_width_classes_and_channels_scale_the_model(
    classes: int, width: float, in_channels: int, count: int
) -> None:
    model = VGG16(classes, width, in_channels)
    assert parameters(model) == count
    assert model(torch.zeros(2, in_channels, 32, 32)).shape == (2, classes)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 13
    assert convolutions[-1].out_channels == 512 * width


def test_odd_widths_round_to_whole_channels() -> None:
    model = VGG16(width=1 / 64)
    assert [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)][::4] == [
        1,
        4,
        8,
        8,
    ]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_seed_fixes_the_weights_and_the_first_loss_is_that_of_equal_probabilities() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(VGG16(width=0.125))
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    loss = nn.functional.cross_entropy(models[0](images), labels)
    assert loss.item() == pytest.approx(math.log(10), abs=0.3)


def test_every_parameter_gets_a_gradient_and_a_step_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model = VGG16(width=0.0625)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.randn(20, 3, 32, 32), torch.arange(20) % 10
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_one_image_and_larger_images_pass() -> None:
    model = VGG16(width=0.125)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert model(torch.zeros(1, 3, 64, 96)).shape == (1, 10)


@pytest.mark.parametrize(
    "shape", [(2, 3, 31, 32), (2, 3, 32, 48), (2, 1, 32, 32), (3, 32, 32), (2, 3, 0, 32)]
)
def test_images_of_another_shape_are_refused_with_their_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images of (shape \(|\d+x\d+)"):
        VGG16(width=0.125)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes 0 is not at least 1"),
        ({"in_channels": 0}, "in_channels 0 is not at least 1"),
        ({"width": 0.0}, "width 0.0 is not in"),
        ({"width": -1.0}, "width -1.0 is not in"),
        ({"width": math.nan}, "width nan is not in"),
        ({"width": math.inf}, "width inf is not in"),
        ({"width": 0.001}, "width 0.001 leaves no channel"),
    ],
)
def test_impossible_sizes_are_refused_with_their_value(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VGG16(**arguments)  # type: ignore[arg-type]
