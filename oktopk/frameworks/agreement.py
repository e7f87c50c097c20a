"""What the frameworks have in common: when parameters are what all ranks agree on, and every rank's state in a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from oktopk.elastic import redistribute, saved_rank
from oktopk.torch.agreement import reducing_ddp
from oktopk.torch.optimizer import DistributedOptimizer


class Agreement:
    """Enters and leaves `agreed` of a training's optimizers, and has the states of all ranks saved and loaded.

    Once `watch` was called, a forward pass in eval mode without gradients, and `state_dict` of the model, enter `agreed`. Any
    other forward pass, a step, and a state that is loaded leave it. In between the parameters stay what all ranks agree on.

    It may be copied and pickled with a model that has its hooks. A copy has no optimizers, and does nothing.

    Args:
        optimizers: of the training, as the framework has them. Those that are no `DistributedOptimizer` are left alone.
        ranks: of the framework; 1 where it sees a single process.

    Raises:
        ValueError: an optimizer is of other ranks, or of shards of a model; on every rank alike.
    """

    def __init__(self, optimizers: Iterable[Any] = (), ranks: int = 1) -> None:
        numbered = ((number, getattr(each, "optimizer", each)) for number, each in enumerate(optimizers))
        self._optimizers = {
            number: each for number, each in numbered if isinstance(each, DistributedOptimizer)
        }
        self._ranks = ranks
        self._within: ExitStack | None = None
        self._until_leave: ExitStack | None = None
        self._handles: list[Any] = []
        self._expected: dict[int, Callable[[], dict[str, Any]]] = {}  # states to load, by optimizer
        for optimizer in self._optimizers.values():
            size = optimizer.reducer.transport.size
            if ranks not in (1, size) or getattr(optimizer, "replica", "") == "shards":
                raise ValueError(
                    f"the framework has {ranks} ranks, and the optimizer sums over {size}: wrap it over all ranks, each with "
                    "the whole model, or enter agreed() and save the states yourself"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement, ()

    # what parameters hold

    def watch(self, *models: nn.Module) -> None:
        """Hook optimizers, and the models that have parameters of theirs, and switch off the sums of their DDPs.

        Raises:
            ValueError: a DDP has another hook; on every rank alike.
        """
        trained: set[int] = set()
        for optimizer in self._optimizers.values():
            _switch_off_ddp(optimizer)
            trained.update(id(each) for group in optimizer.param_groups for each in group["params"])
            self._handles.append(optimizer.register_step_pre_hook(self.leave))
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._before_load))
        for model in models:
            if trained.isdisjoint(map(id, model.parameters())):
                continue
            self._handles.append(model.register_forward_pre_hook(self._before_forward))
            self._handles.append(model.register_state_dict_pre_hook(self.enter))

    @torch._disable_dynamo
    def enter(self, *_: object) -> None:
        """Make the parameters what all ranks agree on, until `leave`, or a forward pass that does not evaluate."""
        self._within = self._within or self._entered()

    @torch._disable_dynamo
    def hold(self) -> None:
        """As `enter`, until `leave` alone."""
        self._until_leave = self._until_leave or self._entered()

    @torch._disable_dynamo
    def leave(self, *_: object) -> None:
        """Make the parameters what this rank's own training goes on from."""
        with torch.inference_mode(False):
            for stack in (self._within, self._until_leave):
                if stack is not None:
                    stack.close()
        self._within = self._until_leave = None

    def end(self) -> None:
        """Enter for good, and watch no more: the training has ended."""
        self.hold()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        """Close the optimizers, so that their parameters can be wrapped again; these stay what all ranks agree on. Collective."""
        self.end()
        for optimizer in self._open():
            optimizer.close()
        self.leave()

    @torch._disable_dynamo
    def _before_forward(self, model: nn.Module, _: object) -> None:
        if not (model.training or torch.is_grad_enabled()):
            self.enter()
        elif self._within is not None:
            with torch.inference_mode(False):
                self._within.close()
            self._within = None

    def _entered(self) -> ExitStack:
        """Within it the parameters of all optimizers are agreed on."""
        stack = ExitStack()
        with torch.inference_mode(False):  # what is kept inside is written to outside
            for optimizer in self._open():
                stack.enter_context(optimizer.agreed())
        return stack

    def _open(self) -> list[DistributedOptimizer]:
        """Those that were not closed."""
        return [each for each in self._optimizers.values() if not hasattr(type(each), "_was_closed")]

    # states

    def save(self, folder: str) -> None:
        """Write this rank's states beside a framework's checkpoint, which has those of rank 0."""
        if self._optimizers:
            os.makedirs(folder, exist_ok=True)
            states = {number: optimizer.state_dict() for number, optimizer in self._optimizers.items()}
            torch.save(states, _file(folder, self._rank))

    def expect(self, read: Callable[[int], Any], saved_ranks: int) -> None:
        """Let the next state that each optimizer loads, rank 0's on all ranks, be this rank's own of a checkpoint.

        Args:
            read: saved rank -> its states, by the numbers of the optimizers.
            saved_ranks: how many ranks saved theirs.
        """
        for number, optimizer in self._optimizers.items():

            def state(number: int = number, optimizer: DistributedOptimizer = optimizer) -> dict[str, Any]:
                transport = optimizer.reducer.transport
                here = transport.rank, transport.size, optimizer.hosts
                return redistribute(lambda rank: read(rank)[number], saved_ranks, *here)

            self._expected[id(optimizer)] = state

    def expect_from(self, folder: str) -> None:
        """As `expect`, of what `save` wrote; where no rank has files, each goes on from what the framework loads. Collective.

        Raises:
            ValueError: a rank finds no folder, or cannot read a file there, or some ranks have files and others do not; on every
                rank alike.
        """
        if not self._optimizers:
            return
        first, problem, saved_ranks = next(iter(self._optimizers.values())), "", 0
        if not os.path.isdir(folder):
            problem = f"there is no folder {folder} to go on from: name it by resume_from_checkpoint"
        else:
            try:
                saved_ranks = self._saved_ranks(folder, next(iter(self._optimizers)))
            except Exception as error:  # told to the other ranks, which wait
                problem = f"a state in {folder} cannot be read: {type(error).__name__}: {error}"
        everyone = first.reducer.transport.allgather_objects((problem, saved_ranks))
        for rank, (text, _) in enumerate(everyone):
            if text:
                raise ValueError(f"rank {rank}: {text}")
        numbers = [number for _, number in everyone]
        if len(set(numbers)) > 1:
            raise ValueError(
                f"the ranks have files of states of {numbers} ranks beside the checkpoint: copy all of its files to every host"
            )
        if saved_ranks:
            self.expect(lambda rank: _read(_file(folder, rank)), saved_ranks)

    def load_expected(self) -> None:
        """Load what is expected, where the framework has loaded rank 0's already. Collective."""
        for optimizer in self._optimizers.values():
            if (expected := self._expected.pop(id(optimizer), None)) is not None:
                optimizer.load_state_dict(expected())

    def _before_load(self, optimizer: torch.optim.Optimizer, _: object) -> dict[str, Any] | None:
        self.leave()
        expected = self._expected.pop(id(optimizer), None)
        return None if expected is None else expected()

    def _saved_ranks(self, folder: str, number: int) -> int:
        """How many ranks saved the states in a folder, as the first one says, else this rank's; 0 where neither is there."""
        for file in (_file(folder, 0), _file(folder, self._rank)):
            if os.path.exists(file):
                saved = saved_rank(_read(file, mmap=True)[number])
                return saved[1] if saved else 0
        return 0

    @property
    def _rank(self) -> int:
        return next(iter(self._optimizers.values())).reducer.transport.rank

    def gathered(self, states: Sequence[Any]) -> list[Any] | None:
        """The states of all ranks of a framework's process group on rank 0; None elsewhere, and where ranks save by themselves.

        Args:
            states: this rank's, by the numbers of the optimizers.

        Traffic: every rank's states go to rank 0, pickled.
        """
        sizes = {optimizer.reducer.transport.size for optimizer in self._optimizers.values()}
        if sizes != {self._ranks}:
            return None
        every: list[Any] | None = [states]
        if self._ranks > 1:
            every = [None] * self._ranks if dist.get_rank() == 0 else None
            # by NCCL all states would pass through the memory of rank 0's GPU
            group = dist.new_group(backend="gloo") if "nccl" in dist.get_backend() else None
            dist.gather_object(states, every, group=group)
            if group is not None:
                dist.destroy_process_group(group)
        if every is not None:
            every[0] = states  # the same tensors, which torch.save then writes once
        return every


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"oktopk-{rank}.pt")


def _read(file: str, mmap: bool = False) -> Any:
    return torch.load(file, weights_only=True, mmap=mmap)


def _switch_off_ddp(optimizer: DistributedOptimizer) -> None:
    """Let no DDP sum the gradients of an optimizer that has its ranks sum them, or its updates, by itself.

    Raises:
        ValueError: a DDP has another hook; on every rank alike.
    """
    if not dist.is_available():
        return
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ranks = getattr(optimizer._replica, "averaged", 1)
    while (ddp := reducing_ddp(parameters, ranks)) is not None:
        if ddp._comm_hooks:
            raise ValueError(
                "a DistributedDataParallel with a hook of its own reduces the gradients of a DistributedOptimizer: leave out one "
                "of the two"
            )
        ddp.register_comm_hook(None, noop_hook)
        # A DDP may be freed after its group was destroyed; its attributes are freed in their order. What refers to the group last
        # waits for gloo's threads, and one of these may wait for the interpreter's lock. torch's Reducer keeps that lock, and the
        # program would hang. Python's reference releases it, and becomes the last one.
        vars(ddp)["process_group"] = vars(ddp).pop("process_group")
