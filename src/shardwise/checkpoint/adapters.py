"""Adapters of PEFT in an export: which tensors PEFT saves of a model, and layers with their adapters merged.

PEFT decides both, on the module that it wrapped. It never sees the engine's parameters: which of them it saves is found
with tensors without values, and a layer is merged in a copy that gets whole values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import CheckpointError

PREFIX = "base_model.model."
"""How names begin in a PeftModel. The model inside it has the rest."""


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` is PEFT's, or has adapters of PEFT (`model.add_adapter`)."""
    return bool(getattr(model, "peft_config", None))


def base_of(model: nn.Module) -> nn.Module:
    """The model that a PeftModel wraps; another model itself."""
    get = getattr(model, "get_base_model", None)
    return get() if has_adapters(model) and get is not None else model


def adapter_names(model: nn.Module, names: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that PEFT saves as adapters; `names` has a tensor without values for each."""
    found: set[str] = set()
    by_id = {id(tensor): name for name, tensor in names.items()}
    for adapter in _adapters(model):
        for key, tensor in _adapter_state(model, names, adapter).items():
            if id(tensor) not in by_id:
                raise CheckpointError(
                    f"PEFT computes {key!r} of the adapter {adapter!r} when it saves it, and an export cannot: call "
                    "model.save_pretrained within shardwise.gathered(model.parameters())"
                )
            found.add(by_id[id(tensor)])
    return found


def save_adapters(model: Any, values: dict[str, torch.Tensor], folder: Path) -> None:
    """Write adapters as PEFT does: `adapter_model.safetensors` and `adapter_config.json`."""
    if hasattr(model, "get_base_model"):
        model.save_pretrained(str(folder), state_dict=values)
        return
    from safetensors.torch import save_file

    for adapter in _adapters(model):
        target = folder if adapter == "default" else folder / adapter
        target.mkdir(exist_ok=True)
        state = {f"{PREFIX}{key}": tensor for key, tensor in _adapter_state(model, values, adapter).items()}
        save_file(state, target / "adapter_model.safetensors", metadata={"format": "pt"})
        model.peft_config[adapter].save_pretrained(str(target))


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules of a model that PEFT put in place of a layer, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not is_inside and (hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")):
            found[path] = module
    return found


def check_merge(model: Any) -> None:
    """Raise a CheckpointError if PEFT cannot merge the adapters of a model."""
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise CheckpointError("adapters that learn a prompt cannot be merged: export without merged=True")
    tuner = getattr(model, "base_model", None)
    try:
        getattr(tuner, "_check_merge_allowed", lambda: None)()
    except (ValueError, NotImplementedError, TypeError) as error:
        raise CheckpointError(f"PEFT cannot merge these adapters ({error}): export without merged=True") from error


def unloaded(layer: Any, merges: bool = False) -> nn.Module:
    """The layer without its adapters; with `merges`, they are first merged into it, in place."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        inner: nn.Module = layer.unload_and_optionally_merge_module(merges, False, None)
        return inner
    if merges:
        layer.merge(safe_merge=False, adapter_names=None)
    base: nn.Module = layer.get_base_layer()
    return base


def merged_tensors(
    layer: nn.Module, whole: Callable[[nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a layer with its adapters merged, by name; `whole` returns all values of a parameter."""
    # What the memo holds, deepcopy takes instead of a copy: the engine's parameters may have no values.
    memo: dict[int, Any] = {id(param): nn.Parameter(whole(param), requires_grad=False) for param in layer.parameters()}
    with torch.no_grad():
        plain = unloaded(copy.deepcopy(layer, memo), merges=True)
    yield from plain.state_dict().items()


def _adapters(model: Any) -> list[str]:
    return list(model.peft_config)


def _adapter_state(model: nn.Module, tensors: Mapping[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, dict(tensors), adapter)
    return state
