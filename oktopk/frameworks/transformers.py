"""The Hugging Face Trainer with a `DistributedOptimizer`: Trainer(callbacks=[Agreed()])."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from oktopk.frameworks import imported
from oktopk.frameworks.agreement import Agreement

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = imported("transformers", "'transformers[torch]'").TrainerCallback


class Agreed(TrainerCallback):
    """Lets the Trainer evaluate and save what all ranks agree on, and go on from every rank's optimizer.

    Evaluation, checkpoints and the model after training have the parameters of `DistributedOptimizer.agreed`. Each rank writes
    its optimizer into the checkpoint's folder, as `oktopk-RANK.pt`, and goes on from there on any number of ranks, see
    `oktopk.elastic.redistribute`. A DistributedDataParallel has its own sums switched off. An optimizer that is no
    `DistributedOptimizer` is left alone.

    Where each rank is a process alone to the Trainer, as under mpiexec, each needs a folder of its own, and goes on from that, on
    as many ranks.

    Args:
        resume_from_checkpoint: the folder that `Trainer.train` is given as its own argument of this name, where that lies outside
            of `output_dir`, which the Trainer does not tell.

    Raises:
        ImportError: transformers is not installed.
        ValueError: at the start of training: there is no folder of the checkpoint, only some ranks find their files there, the
            optimizer sums over other ranks than the Trainer's, or is of shards of a model, or the DistributedDataParallel has
            another hook; on every rank alike.

    Example:
        >>> trainer = Trainer(model, arguments, optimizers=(optimizer, None), callbacks=[Agreed()])
    """

    def __init__(self, resume_from_checkpoint: str | None = None) -> None:
        self._agreement = Agreement()
        self._folder = resume_from_checkpoint

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **more: Any
    ) -> None:
        """The model is wrapped, and rank 0's optimizer is loaded on all ranks where the training goes on."""
        self._agreement.end()
        self._agreement.leave()
        self._agreement = Agreement([optimizer], args.world_size)
        self._agreement.watch(model)
        if state.global_step:
            folder = self._folder or _folder(args, state)
            self._agreement.expect_from(folder)
            self._agreement.load_expected()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Before the Trainer loads the best model at the end."""
        if control.should_training_stop:
            self._agreement.enter()

    def on_epoch_end(self, *_: object, **more: object) -> None:
        """As `on_step_end`."""
        self._agreement.enter()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Beside rank 0's optimizer, which the Trainer has written."""
        if not args.save_only_model:
            self._agreement.save(_folder(args, state))

    def on_train_end(self, *_: object, **more: object) -> None:
        """The model stays what all ranks agree on."""
        self._agreement.end()


def _folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
