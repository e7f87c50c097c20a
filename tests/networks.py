"""Networks of a user's own, for model.factory, and what is none."""

from __future__ import annotations

from torch import nn

from models.bert import BERT
from models.lstm import LSTM

DIGITS = 3 * 32 * 32
SETTINGS = {"hidden": 3}


def digits(hidden: int, *, biased: bool = True) -> nn.Module:
    if hidden < 1:
        raise ValueError(f"hidden {hidden} is not at least 1")
    return nn.Sequential(
        nn.Flatten(), nn.Linear(DIGITS, hidden, bias=biased), nn.ReLU(), nn.Linear(hidden, 10)
    )


def speech() -> nn.Module:
    return LSTM(width=0.0625)


class Text(BERT):
    def __init__(self, words: int) -> None:
        super().__init__(words, layers=1, hidden=64)


def not_a_network() -> list[nn.Module]:
    return [nn.Linear(3, 3)]


def without_parameters() -> nn.Module:
    return nn.Flatten()
