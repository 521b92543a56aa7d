"""Tensor parallelism: cut a model over the ranks of one mesh axis, by torch's `parallelize_module`.

A plan gives the modules by path, with `*` for any part of it, and how each is cut:

| plan says    | what is cut                                               | for                                  |
|--------------|-----------------------------------------------------------|--------------------------------------|
| "columns"    | a Linear by outputs: each rank has some heads or channels | queries, keys, values; gate, up      |
| "rows"       | a Linear by inputs; the ranks' outputs are added up       | what follows such a module: out, down |
| "vocabulary" | an Embedding by rows; the ranks' outputs are added up     | tokens                               |
| "logits"     | a Linear by outputs, which are gathered                   | the head                             |

or one of torch's own styles, such as `SequenceParallel()`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.comm.mesh import check_is_mesh
from shardwise.errors import ConfigError
from shardwise.models.built_in import GPT
from shardwise.models.decoder import CausalDecoder
from shardwise.models.dimensions import check_heads

_CUTS = ("columns", "rows", "vocabulary", "logits")
DECODER_PLAN = {
    "model.embed_tokens": "vocabulary",
    "model.layers.*.self_attn.[qkv]_proj": "columns",
    "model.layers.*.self_attn.o_proj": "rows",
    "model.layers.*.mlp.gate_proj": "columns",
    "model.layers.*.mlp.up_proj": "columns",
    "model.layers.*.mlp.down_proj": "rows",
    "lm_head": "logits",
}
"""For the decoder that `shardwise train` trains, and any Llama with Hugging Face's names."""
GPT_PLAN = {
    "embed": "vocabulary",
    "blocks.*.[qkv]": "columns",
    "blocks.*.out": "rows",
    "blocks.*.up": "columns",
    "blocks.*.down": "rows",
    "head": "logits",
}


def tensor_parallel(model: nn.Module, mesh: Any, plan: Mapping[str, Any] | None = None) -> nn.Module:
    """Cut `model` in place over the ranks of the one-dimensional `mesh`, and return it.

    Every rank passes the same values, and each keeps its part. Inside `with shardwise.deferred_init():`, no rank ever
    has more. Without `plan`, the model is one of shardwise's own.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = tensor_parallel(GPT(..., fused=False), mesh["tp"])
        engine = shardwise.initialize(model, optimizer, "zero3", mesh=mesh["dp"])
    """
    from torch.distributed.tensor.parallel import parallelize_module

    check_is_mesh(mesh)
    if mesh.ndim != 1:
        raise ConfigError(f"the mesh has the axes {mesh.mesh_dim_names}: pass the one to cut over, mesh['tp']")
    if plan is not None and not isinstance(plan, Mapping):
        raise ConfigError(
            f"the tensor-parallel plan is {plan!r}: pass a dictionary, such as {{'layers.*.up': 'columns', "
            "'layers.*.down': 'rows'}, or leave it out for shardwise's own models"
        )
    given = _plan_of(model, mesh.size()) if plan is None else plan
    cuts = {path: how for key, how in given.items() for path in _matching(model, key)}
    ties = _ties(model)
    styles = {path: _style(how, path, model.get_submodule(path), mesh.size()) for path, how in cuts.items()}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for alias, name in ties.items():
        path, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(name))
    return model


def _plan_of(model: nn.Module, size: int) -> Mapping[str, Any]:
    if isinstance(model, CausalDecoder):
        model.model.of.part(size)  # raises if it has no part
        return {key: how for key, how in DECODER_PLAN.items() if "gate" not in key or _named(model, key)}
    if isinstance(model, GPT):
        if model.fused:
            raise ConfigError("GPT has q, k and v in one matrix, which cannot be cut: build it with fused=False")
        check_heads(model.heads, size)
        return GPT_PLAN
    raise ConfigError(
        f"there is no tensor-parallel plan for {type(model).__name__}: pass one, such as {{'layers.*.up': 'columns', "
        "'layers.*.down': 'rows'}, or call torch's parallelize_module yourself"
    )


def _named(model: nn.Module, key: str) -> list[str]:
    return [name for name, _ in model.named_modules() if fnmatchcase(name, key)]


def _matching(model: nn.Module, key: str) -> list[str]:
    found = _named(model, key)
    if not found:
        near = difflib.get_close_matches(key.replace("*", "0"), _named(model, "*"), n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ConfigError(f"the tensor-parallel plan names {key!r}, and the model has no such module{hint}")
    return found


def _style(how: Any, path: str, module: Any, size: int) -> Any:
    """torch's style for the module at `path`. It treats what a rank has of an activation as an equal part, so unequal
    ones stay DTensors."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if not isinstance(how, str):
        return how
    _check_cut(how, path, module)
    return {
        "columns": ColwiseParallel(use_local_output=module.weight.shape[0] % size == 0),
        "rows": RowwiseParallel(),
        "vocabulary": RowwiseParallel(input_layouts=Replicate()),
        "logits": ColwiseParallel(output_layouts=Replicate()),
    }[how]


def _check_cut(how: str, path: str, module: nn.Module) -> None:
    if how not in _CUTS:
        near = difflib.get_close_matches(how, _CUTS, n=1)
        hint = f", such as {near[0]!r}" if near else ""
        raise ConfigError(f"the tensor-parallel plan says {how!r} of {path!r}: take one of {', '.join(_CUTS)}{hint}")
    if not isinstance(module, nn.Embedding if how == "vocabulary" else nn.Linear):
        raise ConfigError(
            f"{path!r} is a {type(module).__name__}, which cannot be cut by {how}: name a Linear (or, for vocabulary, "
            "an Embedding), or give one of torch's styles"
        )


def _ties(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, with the first: each name of a module is cut by itself."""
    first: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in names if first.setdefault(id(param), name) != name}
