"""The Vision Transformer: images cut into patches, and a transformer's encoder over them."""

import torch
from torch import nn

from models.transformer import Layer, initialise

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
        ValueError: the image is no multiple of `patch`.

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
        if image < patch or image % patch:
            raise ValueError(f"image {image} is not a positive multiple of the patch's {patch} pixels")
        self.patches = nn.Conv2d(in_channels, hidden, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, hidden))
        self.layers = nn.Sequential(*(Layer(hidden, eps=1e-6) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.classifier = nn.Linear(hidden, classes)
        nn.init.normal_(self.positions, std=0.02)
        initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores of a batch.

        Args:
            images: float32[batch, in_channels, image, image].

        Returns:
            float32[batch, classes], logits.
        """
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        scores: torch.Tensor = self.classifier(self.norm(self.layers(tokens)[:, 0]))
        return scores
