"""Parameters that tensor parallelism has cut: DTensors, as `parallelize_module` and transformers' `tp_plan` make them.

    weight                  shape of the whole tensor, `device_mesh` (one axis: tp), `placements`; `grad` is a DTensor
    weight._local_tensor    this rank's part: what a unit lays out, gathers, releases and updates

Only the `data` of the local tensor is replaced, so autograd and torch's modules find it wherever it is. Parameters that
are not DTensors are held whole by every rank of the tp axis, as DTensors with the placement Replicate are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.partition.part import TensorPart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Importing torch.distributed.tensor takes a second, and a model without DTensors does not need it.


def is_dtensor(tensor: Any) -> bool:
    """Whether a parameter, or a gradient, is a DTensor."""
    kind = type(tensor)
    return kind is not nn.Parameter and kind is not torch.Tensor and hasattr(tensor, "_local_tensor")


def local(param: Any) -> torch.Tensor:
    """The tensor that has this rank's values of a parameter: itself, unless it is a DTensor."""
    values: torch.Tensor = param._local_tensor if is_dtensor(param) else param
    return values


def tp_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which the model's parameters are cut; None for a model without DTensors.

    A ConfigError if they are cut in a way that is not supported.
    """
    found: dict[tuple[int, ...], tuple[str, Any]] = {}
    params: dict[str, Any] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer):
            raise ConfigError(f"buffer {name!r} is a DTensor: replace it by its full_tensor() before initialize")
    for name, param in params.items():
        if is_dtensor(param):
            _check(name, param)
            found.setdefault(tuple(param.device_mesh.mesh.flatten().tolist()), (name, param))
    if len(found) > 1:
        (one, _), (other, _) = list(found.values())[:2]
        raise ConfigError(
            f"parameters {one!r} and {other!r} are DTensors over different ranks ({', '.join(map(str, found))}): "
            "parallelize the whole model over one mesh, mesh['tp']"
        )
    return next((param.device_mesh for _, param in found.values()), None)


def _check(name: str, param: Any) -> None:
    mesh = param.device_mesh
    if mesh.ndim != 1:
        axes = ", ".join(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
        raise ConfigError(
            f"parameter {name!r} is a DTensor over {mesh.ndim} axes ({axes}): apply tensor parallelism over one axis, "
            "parallelize_module(model, mesh['tp'], plan), and leave the data axis to shardwise (no fully_shard)"
        )
    (placement,) = param.placements
    if type(placement).__name__ == "_StridedShard":
        raise ConfigError(
            f"parameter {name!r} is packed and has the placement {placement!r}, and only Shard and Replicate are "
            "supported: leave its module out of the plan, such as apply_tensor_parallelism(model, mesh['tp'], {key: "
            "how for key, how in model.tp_plan.items() if 'experts' not in key})"
        )
    if type(placement).__name__ not in ("Shard", "Replicate"):
        raise ConfigError(
            f"parameter {name!r} has the placement {placement!r}, and only Shard and Replicate are supported: "
            "redistribute it before shardwise.initialize"
        )


def part_of(param: Any, count: int, index: int) -> TensorPart | None:
    """Which part of a parameter the rank `index` of `count` in the tp axis holds; None without such an axis."""
    if not is_dtensor(param):
        return TensorPart(tuple(param.shape), None, count, index) if count > 1 else None
    (placement,) = param.placements
    dim = placement.dim % param.ndim if placement.is_shard() else None
    part = TensorPart(tuple(param.shape), dim, count, index)
    assert part.local_shape == tuple(param._local_tensor.shape), f"{part} is not {param._local_tensor.shape}"
    return part


def uneven_cut(model: nn.Module) -> str:
    """What to do about a parameter that is cut into unequal parts, if the model has one; else empty."""
    params: dict[str, Any] = dict(model.named_parameters())
    for name, param in params.items():
        if is_dtensor(param) and param.placements[0].is_shard():
            dim, count = param.placements[0].dim % param.ndim, param.device_mesh.size()
            sizes = [TensorPart(tuple(param.shape), dim, count, index).size for index in range(count)]
            if len(set(sizes)) > 1:
                return (
                    f"parameter {name!r} of shape {tuple(param.shape)} is cut along dimension {dim} into unequal parts "
                    f"({', '.join(map(str, sizes))}), and torch takes the local outputs of a module for equal parts: "
                    f"choose a size that {count} divides, pass DTensors on (ColwiseParallel(use_local_output=False)), "
                    "or leave the module out of the plan"
                )
    return ""


def broken_tie(model: nn.Module) -> tuple[str, str] | None:
    """The names of an embedding and a head that were one parameter before the model was cut: `parallelize_module` and
    transformers' `apply_tensor_parallelism` make one of each name."""
    params: dict[str, Any] = dict(model.named_parameters())
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]
    for name, one in ((name, params[name]) for path in paths if (name := f"{path}.weight") in params):
        for other_name, other in params.items():
            are_cut = is_dtensor(one) or is_dtensor(other)
            is_trained = one.requires_grad or other.requires_grad
            if other is not one and other.shape == one.shape and are_cut and is_trained and _are_equal(one, other):
                return name, other_name
    return None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether this rank has the same values of both, which are not all alike."""
    mine, theirs = local(one).detach(), local(other).detach()
    if mine.shape != theirs.shape:
        mine, theirs = (mine, cut(one, theirs)) if is_dtensor(one) else (cut(other, mine), theirs)
    if mine.shape != theirs.shape or mine.is_meta or theirs.is_meta or not mine.numel():
        return False
    return torch.equal(mine, theirs) and bool((mine != mine.flatten()[0]).any())


def set_dtype(param: Any, dtype: torch.dtype) -> None:
    """Make a DTensor report the dtype that its local tensor is about to get."""
    if is_dtensor(param) and param.dtype != dtype:
        inside = param._local_tensor
        blank = torch.empty((), dtype=dtype, device=inside.device).expand(inside.shape)
        with torch.no_grad():
            made = like(param, blank)
        param.data = made
        param._local_tensor, param._spec = blank, made._spec


def like(param: Any, values: torch.Tensor) -> Any:
    """A tensor of the parameter's kind around this rank's `values`: themselves, unless it is a DTensor."""
    if not is_dtensor(param):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def local_grads(params: Sequence[Any], grads: Sequence[Any]) -> list[torch.Tensor | None]:
    """This rank's part of each gradient. A collective over the tp axis for a gradient whose placement is not its
    parameter's: that of a norm under sequence parallelism is Partial, and added up here."""
    return [local_grad(param, grad) if is_dtensor(grad) else grad for param, grad in zip(params, grads, strict=True)]


def local_grad(param: Any, grad: Any) -> torch.Tensor:
    """As `local_grads`, of one DTensor."""
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    values: torch.Tensor = grad._local_tensor
    return values.wait() if hasattr(values, "wait") else values


def whole(param: Any, values: torch.Tensor) -> torch.Tensor:
    """The whole tensor from every rank's part of it. A collective over the tp axis."""
    made = like(param, values)
    full: torch.Tensor = made.full_tensor() if is_dtensor(made) else made
    return full


def cut(param: Any, values: torch.Tensor) -> torch.Tensor:
    """This rank's part of whole `values`."""
    if not is_dtensor(param):
        return values
    (placement,) = param.placements
    if not placement.is_shard():
        return values
    mesh, dim = param.device_mesh, placement.dim % param.ndim
    part = TensorPart(tuple(values.shape), dim, mesh.size(), mesh.get_local_rank())
    return values.narrow(dim, part.offset, part.size)


def locals_of(params: Iterable[Any]) -> list[torch.Tensor]:
    """`local` of each."""
    return [local(param) for param in params]
