"""The torch side: optimizer wrapper, AdamW, a hook for DistributedDataParallel, modules, a dense allreduce."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oktopk.torch.adamw import AdamW
    from oktopk.torch.ddp import OkTopkState, ddp_hook
    from oktopk.torch.dense import DenseAllreduce

__all__ = ["AdamW", "DenseAllreduce", "OkTopkState", "ddp_hook"]
_MODULES = {
    "AdamW": "adamw",
    "DenseAllreduce": "dense",
    "OkTopkState": "ddp",
    "ddp_hook": "ddp",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _MODULES:
        return getattr(import_module(f"oktopk.torch.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
