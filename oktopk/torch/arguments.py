"""Arguments of a `DistributedOptimizer`: defaults that follow from others, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from oktopk.settings import DENSE_ABOVE, Settings
from oktopk.torch.local_step import is_adaptive
from oktopk.torch.own_weights import keeps_weights, own_weights_sentence

OKTOPK_FROM = 0.05
"""The last density from which Ok-Topk is the default method of updates."""

_FALLS = 100
"""Exchanges in which the density falls to that which is asked for, with Adam's kind."""

_MOST_FALLING = 10**9
"""Elements up to which it does. With eight ranks lists of a quarter of 1.7e9 are too long for peer memory."""

_STARTS = {"dense_warmup_steps", "density_warmup_steps", "first_density"}

_HOSTS = ("host", "summed")
_REPLICAS = ("auto", "rank", *_HOSTS)


def default_sends(optimizer: Any, method: str | None, density: object) -> str:
    """What is sent: "updates" or "gradients"."""
    scaled = isinstance(optimizer, torch.optim.Optimizer) and "betas" in optimizer.defaults
    dense = method == "dense" or (isinstance(density, float | int) and density > DENSE_ABOVE)
    gradients = isinstance(optimizer, torch.optim.SparseAdam) or dense
    return "updates" if scaled and not gradients else "gradients"


def default_method(sends: str, density: object, every: int | str) -> str:
    """Of updates in each step Ok-Topk lost less than `union` at 6.25 %, more at 1.25 % and below.

    Nothing in between was run. With `every` above 1 `union` lost less at 1 %, too.

    Args:
        density: the last one, perhaps not valid.

    Source: own, docs/results/updates.md.
    """
    often = isinstance(density, float | int) and density >= OKTOPK_FROM and every == 1
    return "oktopk" if often or sends == "gradients" else "union"


def default_start(
    optimizer: torch.optim.Optimizer, sends: str, every: int | str, length: int, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Of Adam's updates in each step a density that falls from 25 % at first, where nothing else is said of the first steps.

    All parameters are to grow from small values then. Without it small language models ended 1 %
    higher, over bytes and over tokens.

    Args:
        length: elements of the vector; of more than a thousand million nothing falls, as scratch for a
            quarter of them may not fit.
        keywords: what the user says of `Settings`, perhaps not valid.

    Returns:
        Further keywords of `Settings`.

    Traffic: at 1 % 10n entries more than without, once.
    Source: own, docs/results/updates.md.
    """
    often = sends == "updates" and every == 1 and is_adaptive(optimizer) and length <= _MOST_FALLING
    return {"density_warmup_steps": _FALLS} if often and not _STARTS & keywords.keys() else {}


def levels_of(replica: str) -> dict[str, str]:
    """What replicas of plain parameters ask of the reducer: its `levels`, if anything."""
    return {} if replica == "auto" else {"levels": "hosts" if replica in _HOSTS else "flat"}


def check_numbers(sends: str, every: Any, local_share: Any, residual_decay: Any) -> None:
    """Raise ValueError where one of these is out of range, or is not for what is sent."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every {every!r} is not an integer >= 1")
    number = isinstance(local_share, float | int) and not isinstance(local_share, bool)
    if local_share is not None and not (number and 0 <= local_share <= 1):
        raise ValueError(f"local_share {local_share!r} is not in [0, 1]")
    number = isinstance(residual_decay, float | int) and not isinstance(residual_decay, bool)
    if residual_decay is not None and not (number and 0 <= residual_decay < math.inf):
        raise ValueError(f"residual_decay {residual_decay!r} is not a number >= 0")
    if residual_decay and sends == "gradients":
        raise ValueError(
            f"residual_decay={residual_decay!r} is for sends='updates': the residual of gradients loses nothing"
        )
    if every > 1 and sends == "gradients":
        raise ValueError(
            f"every {every} is for sends='updates': gradients are summed in each step, add up several by no_sync()"
        )


def refused(sends: str, arguments: dict[str, Any], optimizer: torch.optim.Optimizer, tables: bool) -> str:
    """Which argument does not fit what is sent, in a sentence; "" if all do.

    Args:
        arguments: of a `DistributedOptimizer`, by name, settings among them.
        optimizer: to be wrapped.
        tables: whether some parameters have sparse gradients.
    """
    replica = arguments["replica"]
    if sends == "gradients":
        if replica != "auto":
            return f"replica={replica!r} is for sends='updates': gradients are summed over all ranks"
        return ""
    for name in ("overlap", "bucket_mb", "deferred"):
        if arguments.get(name):
            return f"{name}={arguments[name]!r} is for sends='gradients'"
    if arguments.get("average") is False:
        return "average=False is for sends='gradients': updates are averaged"
    if arguments["method"] == "dense":
        return "method='dense' is for sends='gradients': updates need a method that selects"
    density = arguments.get("density", Settings.density)
    if isinstance(density, float | int) and density > DENSE_ABOVE:
        return f"density {density} is for sends='gradients': above {DENSE_ABOVE} steps are dense, and leave no residual"
    if arguments.get("levels") == "hosts":
        return "levels='hosts' is for sends='gradients': take replica='host', where the ranks of a host step together"
    if replica not in _REPLICAS:
        return f"replica {replica!r} is not one of {', '.join(map(repr, _REPLICAS))}"
    if replica in _HOSTS and arguments.get("levels") == "flat":
        return f"replica={replica!r} is for two levels: leave out levels='flat'"
    if arguments["gradient_type"] not in ("", "float32"):
        return f"gradient_type={arguments['gradient_type']!r} is for sends='gradients': updates are float32"
    if tables:
        return "tables with sparse gradients are for sends='gradients': take that, or build them with sparse=False"
    return _refused_optimizer(optimizer)


def _refused_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot step before the exchange, in a sentence; "" if it can."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.distributed.optim"):
        return f"{name} talks to other ranks by itself: wrap the optimizer that it is made of"
    if all(callable(getattr(optimizer, step, None)) for step in ("first_step", "second_step")):
        return f"{name} moves the parameters between two backward passes: wrap the optimizer that its second step calls"
    if any("train_mode" in group for group in optimizer.param_groups) or keeps_weights(optimizer):
        return own_weights_sentence(optimizer)
    return ""
