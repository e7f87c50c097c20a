"""VGG-16 with batch norm for 32x32 images, as in the paper's CIFAR-10 experiments."""

import torch
from torch import nn

# Output channels of the 3x3 convolutions at full width, one tuple per stage; a max-pool ends each stage.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
REDUCTION = 2 ** len(STAGES)


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions with batch norm and ReLU, five 2x2 max-pools, one linear layer.

    Full width has 14,728,266 parameters for 10 classes, a quarter of the width 924,186. The convolutions keep
    their bias although batch norm cancels it: the count of the paper includes it.

    Images larger than 32x32 are averaged over what remains of height and width before the linear layer, so
    the number of parameters does not depend on the image.

    Initial weights come from torch's global generator (Kaiming normal for the convolutions); seed it before.

    Args:
        classes: outputs, at least 1.
        width: factor on the channels of every convolution, rounded to whole channels.
        in_channels: channels of the images, at least 1.

    Raises:
        ValueError: width so small that no channel is left.

    Source: Simonyan & Zisserman, ICLR 2015, configuration D, with batch norm and one linear layer as in
        Li & Hoefler, PPoPP 2022.
    """

    def __init__(self, classes: int = 10, width: float = 1.0, in_channels: int = 3) -> None:
        super().__init__()
        if round(STAGES[0][0] * width) < 1:
            raise ValueError(f"width {width} leaves no channel: it must be above {0.5 / STAGES[0][0]}")
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in STAGES:
            for full in stage:
                scaled = round(full * width)
                layers += [
                    nn.Conv2d(channels, scaled, 3, padding=1),
                    nn.BatchNorm2d(scaled),
                    nn.ReLU(inplace=True),
                ]
                channels = scaled
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # always made with a bias here
            elif isinstance(module, nn.Linear):
                # Small, so that training starts from equal probabilities: a loss of log(classes).
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores of a batch.

        Args:
            images: float32[batch, in_channels, height, width]; height and width are positive multiples of 32.

        Returns:
            float32[batch, classes], logits.
        """
        scores: torch.Tensor = self.classifier(self.features(images).mean(dim=(2, 3)))
        return scores
