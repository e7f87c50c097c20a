"""Lightning with a `DistributedOptimizer`: Trainer(callbacks=[Agreed()])."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from oktopk.frameworks import imported
from oktopk.frameworks.agreement import Agreement

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    _NAMES = "lightning.pytorch", "pytorch_lightning"
    _known = [name for name in _NAMES if name in sys.modules]  # what the program itself uses
    _known += [name for name in _NAMES if find_spec(name.partition(".")[0])]
    Callback = imported(next(iter(_known), _NAMES[0]), "lightning").Callback


class Agreed(Callback):
    """Lets Lightning evaluate and save what all ranks agree on, and go on from every rank's optimizer.

    Validation, tests, checkpoints, those of weights alone too, and the module after training have the parameters of
    `DistributedOptimizer.agreed`. A checkpoint has the optimizers of all ranks, and is gone on from on any number of them, see
    `oktopk.elastic.redistribute`. A DistributedDataParallel has its own sums switched off. Optimizers that are no
    `DistributedOptimizer` are left alone. It is for `lightning.pytorch` and for `pytorch_lightning`.

    Where each rank is a process alone to Lightning, as under mpiexec, each saves its own checkpoint, and goes on from that, on as
    many ranks.

    Raises:
        ImportError: neither package is installed.
        ValueError: at the start of training: the optimizer sums over other ranks than Lightning's, or is of shards of a model,
            or the DistributedDataParallel has another hook; on every rank alike.

    Memory: in a checkpoint rank 0 holds the states of all ranks.

    Example:
        >>> trainer = Trainer(callbacks=[Agreed()])
    """

    def __init__(self) -> None:
        self._agreement = Agreement()
        self._saved: Any = None  # the optimizers of all ranks, of a checkpoint

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Before a further training wraps the parameters anew."""
        if stage == "fit":
            self._agreement.close()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning then loads rank 0's optimizers on all ranks."""
        self._saved = checkpoint.get("oktopk")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """The module is wrapped, the optimizers are made, and nothing is loaded into them."""
        self._agreement = Agreement(trainer.optimizers, trainer.world_size)
        self._agreement.watch(module)
        if self._saved is not None:
            self._agreement.expect(self._saved.__getitem__, len(self._saved))
            self._saved = None

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Steps of validation may call no forward pass that can be watched, or one that computes gradients."""
        self._agreement.hold()

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_start(self, trainer: Any, module: Any, batch: object, number: int) -> None:
        """After validation."""
        self._agreement.leave()

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Beside rank 0's optimizers, which Lightning writes."""
        if (every := self._agreement.gathered(checkpoint["optimizer_states"])) is not None:
            checkpoint["oktopk"] = every

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """The module stays what all ranks agree on."""
        self._agreement.end()
