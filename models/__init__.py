"""The networks that the experiments train: plain torch modules that never communicate."""

from models.vgg import VGG16

__all__ = ["VGG16"]
