"""Parameters that FSDP2 shards: DTensors, and this rank's shards of them as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def is_sharded(parameter: Any) -> bool:
    """Whether a parameter is a DTensor, as `fully_shard` makes them."""
    return hasattr(parameter, "device_mesh")


def local_tensor(parameter: Any) -> Tensor:
    """This rank's shard of a parameter, of which it shares the memory; the parameter, detached, if it is not sharded."""
    return held_tensor(parameter).detach()


def held_tensor(parameter: Any) -> Tensor:
    """The very tensor that holds this rank's shard of a parameter; the parameter, if it is not sharded."""
    return parameter._local_tensor if is_sharded(parameter) else parameter


def kept_locally(value: Any, parameter: Any) -> Any:
    """What an optimizer keeps of a parameter, as it is saved: of what is laid out as the parameter this rank's shard."""
    alike = is_sharded(value) and is_sharded(parameter) and value.shape == parameter.shape
    if alike and (value.device_mesh, value.placements) == (parameter.device_mesh, parameter.placements):
        return local_tensor(value)
    return value


def laid_out_as_parameter(value: Any, parameter: Any) -> Any:
    """The reverse of `kept_locally`, on the parameter's mesh, which may be another one than that of before."""
    plain = isinstance(value, Tensor) and not is_sharded(value)
    if not (plain and is_sharded(parameter) and value.shape == held_tensor(parameter).shape):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


def check_shards(
    parameters: Sequence[Any], sends: str, replica: str, tables: Sequence[Tensor], levels: str
) -> None:
    """Raise ValueError where parameters of which some are sharded cannot be trained.

    Args:
        parameters: of an optimizer, those that need a gradient.
        sends, replica: as `DistributedOptimizer`.
        tables: the parameters with sparse gradients.
        levels: of the settings.
    """
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if not sharded:
        return
    from torch.distributed.tensor import Shard

    if any(parameter.device_mesh.ndim > 1 for parameter in sharded):
        raise ValueError(
            "a parameter is on a mesh of two dimensions, over which FSDP reduces densely: call "
            'fully_shard(..., mesh=mesh["shard"])'
        )
    if sends == "gradients":
        raise ValueError("a parameter is sharded, as by fully_shard: pass sends='updates'")
    if len(sharded) < len(parameters):
        raise ValueError(
            f"{len(sharded)} parameter(s) of the optimizer are sharded and {len(parameters) - len(sharded)} are not: give those "
            "that are not an optimizer of their own"
        )
    for parameter in sharded:
        (placement,) = parameter.placements
        if parameter.device_mesh != sharded[0].device_mesh:
            raise ValueError(
                "parameters are sharded over several meshes: give those of each an optimizer of their own"
            )
        if type(placement) is not Shard:
            raise ValueError(
                f"a parameter is laid out as {placement}, not as Shard: only what fully_shard makes can be exchanged"
            )
        if type(held_tensor(parameter)) is not Tensor:
            kind = type(held_tensor(parameter)).__name__
            raise ValueError(
                f"a shard is a {kind}, not a plain tensor: leave low precision to FSDP's MixedPrecisionPolicy"
            )
    if replica != "auto" or levels == "hosts":
        wrong = "levels='hosts'" if replica == "auto" else f"replica={replica!r}"
        raise ValueError(
            f"{wrong} is not for sharded parameters: the ranks that shard one model are the replica"
        )
    if tables:
        raise ValueError("tables with sparse gradients cannot be sharded: build them with sparse=False")
