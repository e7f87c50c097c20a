"""A layer of a transformer with the norm first, in heads of 64 channels: ViT's and GPT's."""

import torch
from torch import nn

HEAD = 64


class Layer(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)), on float32[batch, tokens, hidden].

    Args:
        hidden: channels, a positive multiple of 64.
        causal: a token attends to itself and to those before it alone.
        eps: of the norms.
    """

    def __init__(self, hidden: int, *, causal: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self._causal = causal
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        self.attention_input = nn.Linear(hidden, 3 * hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, count, hidden = tokens.shape
        joint = self.attention_input(self.attention_norm(tokens))
        query, key, value = joint.view(batch, count, 3, hidden // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self._causal)
        tokens = tokens + self.attention_output(attended.transpose(1, 2).reshape(batch, count, hidden))
        result: torch.Tensor = tokens + self.feed_forward(self.norm(tokens))
        return result


def initialise(network: nn.Module) -> None:
    """Weights of a standard deviation of 0.02, and biases of zero, for all but the norms."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if (bias := getattr(module, "bias", None)) is not None:
                nn.init.zeros_(bias)
