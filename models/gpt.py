"""GPT-2's network: it predicts each token from those before it."""

import torch
from torch import nn

from models.transformer import Layer, initialise


class GPT(nn.Module):
    """Tokens and learned positions through layers with the norm first; the embedding of the tokens decodes as well (tied).

    With a vocabulary of 16,384 and 512 positions: 4 layers of 192 have 5,023,872 parameters, 6 of 384 (the default) 17,135,616
    and 12 of 768 98,032,128. There is no dropout, and no bias in the decoder.

    Initial weights come from torch's global generator (normal, 0.02); seed it before.

    Args:
        vocabulary: words, at least 1.
        layers: at least 1.
        hidden: channels, a positive multiple of 64.
        positions: tokens of the longest sequence, at least 1.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """

    def __init__(
        self, vocabulary: int = 16_384, *, layers: int = 6, hidden: int = 384, positions: int = 512
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.layers = nn.Sequential(*(Layer(hidden, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        initialise(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the word that follows each token.

        Args:
            tokens: int64[batch, length], each in [0, vocabulary); length at most `positions`.

        Returns:
            float[batch, length, vocabulary], logits; those of a token depend on it and on the tokens before it.
        """
        states = self.layers(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return nn.functional.linear(self.norm(states), self.tokens.weight)
