"""The speech network: utterances that do not see each other, and how far ahead it looks."""

import math

import pytest
import torch

from models import LSTM
from models.lstm import output_lengths


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


def test_a_score_depends_on_no_frame_beyond_the_lookahead() -> None:
    model = trained_a_little()
    first = torch.randn(1, 161, 100)
    second = first.clone()
    second[:, :, 80:] += 1.0
    length = torch.tensor([100])
    before, after = model(first, length)[0][0], model(second, length)[0][0]
    changed = (before != after).any(dim=1).nonzero()[:, 0]
    # the convolutions see frames up to 2 * output + 5 + 2 * 5, the lookahead 20 outputs more
    assert int(changed[0]) == math.ceil((80 - 15) / 2) - 20
