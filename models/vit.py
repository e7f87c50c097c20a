"""The Vision Transformer: images cut into patches, and a transformer's encoder over them."""

import torch
from torch import nn

HEAD = 64
CLASSES = 1000
IMAGE = 224
PATCH = 32


class ViT(nn.Module):
    """Patches through one linear layer, a class token before them, learned positions, layers with the norm first, a linear head.

    With 24 layers of 1024, patches of 32 and 1,000 classes it is ViT-L/32 of 306,535,400 parameters; the default is ViT-B/32.
    Attention is torch's scaled dot product, in heads of 64 channels; the feed-forward layers are four times as wide as the rest.
    There is no dropout.

    Initial weights come from torch's global generator (normal, 0.02); seed it before.

    Args:
        classes: outputs, at least 1.
        layers: of the encoder, at least 1.
        hidden: channels, a positive multiple of 64.
        patch: pixels per side of a patch, at least 1.
        image: pixels per side of the images, a positive multiple of `patch`.
        in_channels: channels of the images, at least 1.

    Raises:
        ValueError: an argument out of bounds.

    Source: Dosovitskiy et al., ICLR 2021, for its pre-training without the extra layer in the head.
    """

    def __init__(
        self,
        classes: int = CLASSES,
        *,
        layers: int = 12,
        hidden: int = 768,
        patch: int = PATCH,
        image: int = IMAGE,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        for name, value in (
            ("classes", classes),
            ("layers", layers),
            ("patch", patch),
            ("in_channels", in_channels),
        ):
            if value < 1:
                raise ValueError(f"{name} {value} is not at least 1")
        if hidden < HEAD or hidden % HEAD:
            raise ValueError(f"hidden {hidden} is not a positive multiple of {HEAD}")
        if image < patch or image % patch:
            raise ValueError(f"image {image} is not a positive multiple of the patch's {patch} pixels")
        self.shape = in_channels, image, image
        self.patches = nn.Conv2d(in_channels, hidden, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, hidden))
        self.layers = nn.Sequential(*(Layer(hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.classifier = nn.Linear(hidden, classes)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # always made with a bias here

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores of a batch.

        Args:
            images: float32[batch, in_channels, image, image].

        Returns:
            float32[batch, classes], logits.

        Raises:
            ValueError: images of another shape.
        """
        if images.shape[1:] != self.shape:
            expected = ", ".join(map(str, self.shape))
            raise ValueError(f"images of shape {tuple(images.shape)} are not [batch, {expected}]")
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        scores: torch.Tensor = self.classifier(self.norm(self.layers(tokens)[:, 0]))
        return scores


class Layer(nn.Module):
    """One layer of the encoder: x + attention(norm(x)), then x + feed_forward(norm(x)), on float32[batch, tokens, hidden].

    Args:
        hidden: channels, a positive multiple of 64.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-6)
        self.attention_input = nn.Linear(hidden, 3 * hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, count, hidden = tokens.shape
        joint = self.attention_input(self.attention_norm(tokens))
        query, key, value = joint.view(batch, count, 3, hidden // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        tokens = tokens + self.attention_output(attended.transpose(1, 2).reshape(batch, count, hidden))
        result: torch.Tensor = tokens + self.feed_forward(self.norm(tokens))
        return result
