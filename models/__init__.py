"""The networks that the experiments train: plain torch modules that never communicate."""

from models.bert import BERT
from models.gpt import GPT
from models.lstm import LSTM
from models.vgg import VGG16
from models.vit import ViT

__all__ = ["BERT", "GPT", "LSTM", "VGG16", "ViT"]
