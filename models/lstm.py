"""A DeepSpeech-like network for speech, as in the paper's AN4 experiments: convolutions, LSTM layers, CTC's logits."""

from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

BINS = 161
"""Frequencies of a spectrogram of 20 ms windows at 16 kHz."""

# (frequency, time) of the two convolutions
KERNELS = ((41, 11), (21, 11))
STRIDES = ((2, 2), (2, 1))
PADDINGS = ((20, 5), (10, 5))
CHANNELS = 32
HIDDEN = 800
LAYERS = 5
CONTEXT = 20

Count = TypeVar("Count", int, torch.Tensor)


class LSTM(nn.Module):
    """Two convolutions over the spectrogram, five one-directional LSTM layers of 800, a lookahead convolution, one linear layer.

    With 161 bins and 29 labels it has 27,569,568 parameters. Batch norm follows each convolution, and precedes each
    LSTM layer but the first and the linear layer. The lookahead sums, for each feature, a frame and the 20 after it.

    What is written for an utterance does not depend on the others in its batch in evaluation: the convolutions see
    zeros beyond its end, recurrent layers and their batch norm see packed sequences. In training the convolutions'
    batch norm counts those zeros.

    Initial weights come from torch's global generator; seed it before.

    Args:
        labels: outputs, CTC's blank among them, at least 2.
        width: factor on the convolutions' channels and on the LSTM's 800, rounded to whole ones.
        bins: frequencies of the spectrograms, at least 1.

    Raises:
        ValueError: width so small that no channel is left.

    Source: Amodei et al., Deep Speech 2, ICML 2016, with the sizes of Li & Hoefler, PPoPP 2022.
    """

    def __init__(self, labels: int = 29, width: float = 1.0, bins: int = BINS) -> None:
        super().__init__()
        channels, hidden = round(CHANNELS * width), round(HIDDEN * width)
        if channels < 1:
            raise ValueError(f"width {width} leaves no channel: it must be above {0.5 / CHANNELS}")
        self.convolutions = nn.ModuleList()
        self.convolution_norms = nn.ModuleList()
        before, features = 1, bins
        for kernel, stride, padding in zip(KERNELS, STRIDES, PADDINGS, strict=True):
            self.convolutions.append(nn.Conv2d(before, channels, kernel, stride, padding))
            self.convolution_norms.append(nn.BatchNorm2d(channels))
            before, features = channels, _outputs(features, kernel[0], stride[0], padding[0])
        sizes = [channels * features, *[hidden] * LAYERS]
        self.recurrent = nn.ModuleList(nn.LSTM(size, hidden) for size in sizes[:-1])
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(LAYERS))
        self.lookahead = nn.Conv1d(hidden, hidden, CONTEXT + 1, groups=hidden, bias=False)
        self.classifier = nn.Linear(hidden, labels, bias=False)

    def forward(self, spectrograms: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Label scores of a batch, frame by frame.

        Args:
            spectrograms: float32[batch, bins, frames]; what lies beyond an utterance's length is not looked at.
            lengths: int64[batch], on the CPU: frames of each utterance, in [1, frames].

        Returns:
            float32[batch, output frames, labels], logits, and int64[batch], on the CPU: how many of the output
            frames are the utterance's, as output_lengths gives it.
        """
        outputs = output_lengths(lengths)
        hidden = self._convolve(spectrograms[:, :, : int(lengths.max())], lengths)
        packed = pack_padded_sequence(hidden, outputs, enforce_sorted=False)
        for layer, norm in zip(self.recurrent, self.norms, strict=True):
            packed, _ = layer(packed)
            if layer is not self.recurrent[-1]:
                packed = _with_data(packed, norm(packed.data))
        hidden, _ = pad_packed_sequence(packed)
        ahead = nn.functional.pad(hidden.permute(1, 2, 0), (0, CONTEXT))
        seen = nn.functional.hardtanh(self.lookahead(ahead), 0.0, 20.0).permute(2, 0, 1)
        last = pack_padded_sequence(seen, outputs, enforce_sorted=False)
        last = _with_data(last, self.classifier(self.norms[-1](last.data)))
        logits: torch.Tensor = pad_packed_sequence(last, batch_first=True)[0]
        return logits, outputs

    def _convolve(self, spectrograms: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[output frames, batch, channels * frequencies] of a batch."""
        hidden = _cut(spectrograms.unsqueeze(1), lengths)
        layers = zip(self.convolutions, self.convolution_norms, KERNELS, STRIDES, PADDINGS, strict=True)
        for convolution, norm, kernel, stride, padding in layers:
            lengths = _outputs(lengths, kernel[1], stride[1], padding[1])
            hidden = norm(_cut(convolution(hidden), lengths))
            hidden = _cut(nn.functional.hardtanh(hidden, 0.0, 20.0), lengths)
        return hidden.flatten(1, 2).permute(2, 0, 1)


def output_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """Output frames of utterances of so many spectrogram frames: half of them, rounded up; at least 1 of 1."""
    for kernel, stride, padding in zip(KERNELS, STRIDES, PADDINGS, strict=True):
        lengths = _outputs(lengths, kernel[1], stride[1], padding[1])
    return lengths


def _outputs(count: Count, kernel: int, stride: int, padding: int) -> Count:
    return (count + 2 * padding - kernel) // stride + 1


def _cut(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Zeros beyond each utterance's end, in [batch, channels, frequencies, frames]."""
    frames = torch.arange(hidden.shape[3], device=hidden.device)
    beyond = frames >= lengths.to(hidden.device, non_blocking=True)[:, None]
    return hidden.masked_fill(beyond[:, None, None, :], 0.0)


def _with_data(packed: PackedSequence, data: torch.Tensor) -> PackedSequence:
    return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
