"""The torch side: optimizer wrapper, hook for DistributedDataParallel, gradients of parameters, modules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oktopk.torch.ddp import OkTopkState, ddp_hook

__all__ = ["OkTopkState", "ddp_hook"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in __all__:
        from oktopk.torch import ddp

        return getattr(ddp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
