"""The speech network: the published size, utterances that do not see each other, and outputs that train."""

import math

import pytest
import torch
from torch import nn

from models import LSTM
from models.lstm import output_lengths


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_full_width_has_the_published_number_of_parameters() -> None:
    assert parameters(LSTM()) == 27_569_568


def test_width_labels_and_bins_scale_the_model() -> None:
    model = LSTM(labels=5, width=0.0625, bins=33)
    assert [layer.hidden_size for layer in model.recurrent] == [50] * 5
    assert model.convolutions[1].out_channels == 2
    logits, lengths = model(torch.randn(2, 33, 21), torch.tensor([21, 8]))
    assert logits.shape == (2, 11, 5)
    assert lengths.tolist() == [11, 4]


@pytest.mark.parametrize(("frames", "outputs"), [(1, 1), (2, 1), (3, 2), (40, 20), (41, 21)])
def test_output_lengths_are_those_of_the_outputs(frames: int, outputs: int) -> None:
    assert output_lengths(torch.tensor([frames])).tolist() == [outputs]
    logits, lengths = LSTM(width=0.0625).eval()(torch.randn(1, 161, frames), torch.tensor([frames]))
    assert (logits.shape[1], lengths.tolist()) == (outputs, [outputs])


def trained_a_little() -> LSTM:
    """A network whose running statistics are not those of the start."""
    torch.manual_seed(3)
    model = LSTM(width=0.0625)
    model(2 * torch.randn(4, 161, 60) + 1, torch.tensor([60, 50, 50, 44]))
    return model.eval()


def test_an_utterance_is_scored_alike_alone_and_among_longer_ones() -> None:
    model = trained_a_little()
    lengths = torch.tensor([23, 57, 40])
    batch = torch.full((3, 161, 64), math.nan)
    for row, length in enumerate(lengths):
        batch[row, :, :length] = torch.randn(161, int(length))
    together, outputs = model(batch, lengths)
    for row, length in enumerate(lengths):
        alone, _ = model(batch[row : row + 1, :, :length], lengths[row : row + 1])
        assert torch.allclose(together[row, : outputs[row]], alone[0], atol=1e-5)


def test_a_score_depends_on_no_more_than_the_lookahead_of_future_frames() -> None:
    model = trained_a_little()
    first = torch.randn(1, 161, 100)
    second = first.clone()
    second[:, :, 80:] += 1.0
    length = torch.tensor([100])
    before, after = model(first, length)[0][0], model(second, length)[0][0]
    changed = (before != after).any(dim=1).nonzero()[:, 0]
    # the convolutions see frames up to 2 * output + 5 + 2 * 5, the lookahead 20 outputs more
    assert int(changed[0]) == math.ceil((80 - 15) / 2) - 20


def test_every_parameter_gets_a_gradient_and_a_few_steps_lower_the_loss_of_ctc() -> None:
    torch.manual_seed(0)
    model = LSTM(labels=6, width=0.0625)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spectrograms, lengths = torch.randn(4, 161, 50), torch.tensor([50, 46, 40, 31])
    targets, sizes = torch.randint(1, 6, (4, 5)), torch.tensor([5, 4, 5, 3])
    losses = []
    for _ in range(12):
        logits, outputs = model(spectrograms, lengths)
        scores = logits.log_softmax(2).transpose(0, 1)
        loss = nn.functional.ctc_loss(scores, targets, outputs, sizes)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_seed_fixes_the_weights() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(LSTM(width=0.0625))
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("shape", "lengths", "message"),
    [
        ((2, 160, 9), [9, 9], r"spectrograms of shape \(2, 160, 9\)"),
        ((161, 9), [9], r"spectrograms of shape \(161, 9\)"),
        ((2, 161, 9), [9], r"lengths of shape \(1,\)"),
        ((2, 161, 9), [9, 0], r"lengths \[9, 0\] are not in \[1, 9\]"),
        ((2, 161, 9), [9, 10], r"lengths \[9, 10\] are not in \[1, 9\]"),
        ((0, 161, 9), [], r"lengths \[\] are not in"),
    ],
)
def test_batches_of_another_shape_are_refused_with_what_they_are(
    shape: tuple[int, ...], lengths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LSTM(width=0.0625)(torch.zeros(shape), torch.tensor(lengths, dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": 1}, "labels 1 is not at least 2"),
        ({"bins": 0}, "bins 0 is not at least 1"),
        ({"width": 0.0}, "width 0.0 is not in"),
        ({"width": math.nan}, "width nan is not in"),
        ({"width": 0.001}, "width 0.001 leaves no channel"),
    ],
)
def test_impossible_sizes_are_refused_with_their_value(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LSTM(**arguments)  # type: ignore[arg-type]
