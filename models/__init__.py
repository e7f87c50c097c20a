"""The networks that the experiments train: plain torch modules that never communicate."""

from models.bert import BERT
from models.lstm import LSTM
from models.vgg import VGG16

__all__ = ["BERT", "LSTM", "VGG16"]
