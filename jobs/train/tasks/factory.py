"""Calls the user's model.factory."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import torch
from torch import nn

from jobs.config.config import Config
from jobs.train.tasks.task import WorkloadError


def call_factory(config: Config) -> nn.Module:
    """What model.factory returns for the keywords of model.arguments; torch is seeded by training.seed before.

    It must suit the data set, as the network that trains on it otherwise:

        images: images[batch, channels, height, width] -> logits[batch, classes], see models.vgg.VGG16
        speech: spectrograms, frames -> logits, output frames, see models.lstm.LSTM.forward
        text: tokens, segments, present, places -> words, follows, see models.bert.BERT.forward

    Raises:
        WorkloadError: no such module or attribute, keywords that do not fit, a ValueError of the factory's own, or a result
            that is no torch.nn.Module with parameters to train. Other errors inside the user's code keep their traceback.
    """
    name, arguments = config.model.factory, config.model.arguments
    module = name.partition(":")[0]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of what the module imports
        package = module.partition(".")[0]
        raise WorkloadError(
            f"model.factory {name!r}: {error}: put the folder that holds {package} on PYTHONPATH, or install it"
        ) from error
    try:
        factory = pkgutil.resolve_name(name)
    except AttributeError as error:
        raise WorkloadError(f"model.factory {name!r}: {error}") from error
    if not callable(factory):
        raise WorkloadError(f"model.factory {name!r} is a {type(factory).__name__}, which cannot be called")
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise WorkloadError(f"model.arguments do not fit {name!r}: {error}") from error
    torch.manual_seed(config.training.seed)
    try:
        network = factory(**arguments)
    except ValueError as error:
        raise WorkloadError(f"model.factory {name!r}: {error}") from error
    if not isinstance(network, nn.Module):
        raise WorkloadError(
            f"model.factory {name!r} returned a {type(network).__name__}, not a torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise WorkloadError(f"model.factory {name!r} returned a network without parameters to train")
    return network
