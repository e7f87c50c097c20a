"""What `oktopk.frameworks.accelerate` promises, on a training that stops and goes on: FOLDER.

The folder keeps a checkpoint: a second start, with another number of ranks, goes on from that alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn

from tests.frameworks.ranks import (
    RANK,
    UNDER_MPI,
    alike,
    digest,
    network,
    optimizer_of,
    own_folder,
    rows,
    say,
)

# isort: split
from accelerate import Accelerator

from oktopk.frameworks.accelerate import agree

ACCELERATOR = Accelerator(cpu=True)
EVALUATED: list[float] = []


def made(kind: str = "updates", compiled: bool = False) -> tuple[Any, Any]:
    model = network().to(ACCELERATOR.device)
    prepared = ACCELERATOR.prepare(
        torch.compile(model, backend="eager") if compiled else model, optimizer_of(model, kind)
    )
    agree(ACCELERATOR, *prepared)
    return prepared


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(rows()), rows().sum(1, keepdim=True)).item()
    model.train()
    return loss


def train(model: nn.Module, optimizer: Any, steps: range, evaluates: bool = True) -> None:
    for step in steps:
        drawn = torch.Generator().manual_seed(64 * step + RANK)  # batches of its own
        inputs = torch.randn(8, 16, generator=drawn)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        ACCELERATOR.backward(loss)
        if step % 15 == 1 and evaluates:
            EVALUATED.append(evaluate(model))  # between the gradient and the step, too
        optimizer.step()
        if step % 15 == 0 and evaluates:
            EVALUATED.append(evaluate(model))


def held(model: nn.Module) -> str:
    return digest(ACCELERATOR.get_state_dict(model).values())


def main(folder: str) -> None:
    saved = os.path.join(own_folder(folder), "saved")
    if not os.path.exists(saved):
        try:
            agree(ACCELERATOR, network(), optimizer_of(network(), "plain"))
            say("what is not prepared is refused", False)
        except ValueError as error:
            say("what is not prepared is refused", "prepare" in str(error))
        model, optimizer = made()
        train(model, optimizer, range(30))
        say("ranks part amid training", not alike(digest(model.parameters())))
        ACCELERATOR.save_state(saved)
        say("saving makes them alike", alike(digest(model.parameters())))
        train(model, optimizer, range(30, 60))
        whole = held(model)
        ACCELERATOR.load_state(saved)
        train(model, optimizer, range(30, 60))
        say("goes back bit for bit", held(model) == whole)
        del model, optimizer
        ACCELERATOR.free_memory()
        model, optimizer = made()
        ACCELERATOR.load_state(saved)
        train(model, optimizer, range(30, 60), evaluates=False)
        say("goes on bit for bit", held(model) == whole)
        inner = ACCELERATOR.unwrap_model(model)
        train(model, optimizer, range(60, 61), evaluates=False)
        inner.eval()
        with torch.inference_mode():
            say("a model without its DDP is alike", alike(digest([inner(rows())])))
        train(model.train(), optimizer, range(61, 62), evaluates=False)
        say("and parts again", not alike(digest(model.parameters())))
        del model, optimizer, inner
        ACCELERATOR.free_memory()
        model, optimizer = made(compiled=True)
        train(model, optimizer, range(60))
        say("a compiled model does the same", held(model) == whole)
        say("it learns", EVALUATED[-1] < 0.7 * EVALUATED[0])
        ACCELERATOR.free_memory()
        model, optimizer = made("gradients")
        train(model, optimizer, range(30))
        ACCELERATOR.save_state(f"{saved}-gradients")
        train(model, optimizer, range(30, 60))
        whole = held(model)
        say("gradients are alike", alike(whole))
        ACCELERATOR.load_state(f"{saved}-gradients")
        train(model, optimizer, range(30, 60))
        say("gradients go back bit for bit", held(model) == whole)
        if not UNDER_MPI:
            ACCELERATOR.free_memory()
            model, optimizer = made(kind="plain")
            train(model, optimizer, range(30))
            say("plain AdamW is left alone", alike(digest(model.parameters())))
    else:
        model, optimizer = made()
        EVALUATED.append(evaluate(model))
        ACCELERATOR.load_state(saved)
        train(model, optimizer, range(30, 60))
        say("all ranks end alike", alike(held(model)))
        say("it learns", EVALUATED[-1] < 0.7 * EVALUATED[0])
    say("evaluation is alike", alike(tuple(EVALUATED)))


main(sys.argv[1])
ACCELERATOR.free_memory()  # before the process group goes: docs/frameworks.md
ACCELERATOR.end_training()
