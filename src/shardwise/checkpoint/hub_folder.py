"""The folder of a model as Hugging Face reads it: names of tensors, weight files, PEFT's adapters, and other files.

PEFT decides which tensors it saves of a model, and how a layer is merged with its adapters, on the module that it
wrapped. It never sees the engine's parameters: which of them it saves is found with tensors without values, and a layer
is merged in a copy that gets whole values.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.files import header_of
from shardwise.checkpoint.folder import writing
from shardwise.errors import CheckpointError

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.json"),
    *("chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# What torch.compile, activation checkpointing and FSDP call the module that they wrap, anywhere in a model.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PARALLEL = "module"
"""What DistributedDataParallel and other wrappers of a whole model call it. Others may use the word, so it counts only
at the start of every name."""
PREFIX = "base_model.model."
"""How names begin in a PeftModel. The model inside it has the rest."""


def underlying(model: nn.Module) -> nn.Module:
    """The model inside all wrappers around it."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def underlying_names(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in the model inside all wrappers, by their names outside.

    >>> underlying_names(["_orig_mod.a.weight", "_orig_mod.layers.0._checkpoint_wrapped_module.b"])
    {'_orig_mod.a.weight': 'a.weight', '_orig_mod.layers.0._checkpoint_wrapped_module.b': 'layers.0.b'}
    >>> underlying_names(["module.a", "module.module.b"]), underlying_names(["module.a", "b"])
    ({'module.a': 'a', 'module.module.b': 'module.b'}, {'module.a': 'module.a', 'b': 'b'})
    """
    found = {name: [part for part in name.split(".") if part not in _WRAPPED] for name in names}
    if found and all(parts[0] == _PARALLEL and len(parts) > 1 for parts in found.values()):
        found = {name: parts[1:] for name, parts in found.items()}
    return {name: ".".join(parts) for name, parts in found.items()}


def _inside(model: nn.Module) -> nn.Module | None:
    children = dict(model.named_children())
    name, child = next(iter(children.items()), ("", None))
    has_own = any(True for _ in model.parameters(recurse=False)) or any(True for _ in model.buffers(recurse=False))
    return child if len(children) == 1 and not has_own and name in (*_WRAPPED, _PARALLEL) else None


class ExportLayout:
    """Which tensors go into which file, in their order, each file as full as `max_bytes` allows.

    tensors   without values, in the dtype and shape in which they are exported
    headers   the header of each file
    offsets   the file of each tensor, and where its bytes begin in it
    sizes     the bytes of each file
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], max_bytes: int) -> None:
        groups: list[list[str]] = [[]]
        size_bytes = 0
        for name, tensor in tensors.items():
            if groups[-1] and size_bytes + tensor.nbytes > max_bytes:
                groups.append([])
                size_bytes = 0
            groups[-1].append(name)
            size_bytes += tensor.nbytes
        count = len(groups)
        self.tensors = tensors
        self.headers: dict[str, bytes] = {}
        self.offsets: dict[str, tuple[str, int]] = {}
        self.sizes: dict[str, int] = {}
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else _SINGLE
            facts = [(name, tensors[name].dtype, tensors[name].shape) for name in group]
            self.headers[file], starts = header_of(facts, metadata=True)
            self.offsets.update({name: (file, start) for name, start in zip(group, starts, strict=True)})
            self.sizes[file] = len(self.headers[file]) + sum(tensors[name].nbytes for name in group)

    def create(self, folder: Path) -> None:
        """Create the files in their full size, with everything except the values, and the index of several."""
        for file, header in self.headers.items():
            with writing(folder / file, self.sizes[file]):
                (folder / file).write_bytes(header)
                os.truncate(folder / file, self.sizes[file])
        if len(self.headers) > 1:
            total = sum(tensor.nbytes for tensor in self.tensors.values())
            weight_map = {name: self.offsets[name][0] for name in self.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def companions(model: nn.Module, given: Path | None) -> dict[str, bytes]:
    """The files that belong next to a model's weights, by name.

    Configurations are those that the model holds. What it does not hold is copied from the folder `given` or, without
    it, from the folder that the model was loaded from.
    """
    inner = base_of(underlying(model))
    found = companions_in(given) if given is not None else {}
    named = getattr(inner, "name_or_path", None)
    if given is None and isinstance(named, str) and named and Path(named).is_dir():
        found = companions_in(Path(named))
    if (config := config_text(model)) is not None:
        found[CONFIG] = config.encode()
    to_text = getattr(getattr(inner, "generation_config", None), "to_json_string", None)
    if to_text is not None:
        found[GENERATION] = str(to_text()).encode()
    return found


def companions_in(folder: Path) -> dict[str, bytes]:
    """The configurations and tokenizer files in a folder, by name."""
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}: name one with the configurations and tokenizer files of the model"
        )
    paths = [folder / name for name in (CONFIG, GENERATION, *TOKENIZER)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def config_text(model: nn.Module) -> str | None:
    """The text of a Hugging Face model's `config.json`; None for a model without a configuration."""
    inner = base_of(underlying(model))
    config: Any = getattr(inner, "config", None)
    if getattr(config, "to_json_string", None) is None:
        return None
    if getattr(config, "architectures", ...) is None:  # set by `save_pretrained`, which is not called here
        config = copy.copy(config)
        config.architectures = [type(inner).__name__]
    return str(config.to_json_string())


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` is PEFT's, or has adapters of PEFT (`model.add_adapter`)."""
    return bool(getattr(model, "peft_config", None))


def base_of(model: nn.Module) -> nn.Module:
    """The model that a PeftModel wraps; another model itself."""
    get = getattr(model, "get_base_model", None)
    return get() if has_adapters(model) and get is not None else model


def adapter_names(model: Any, names: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that PEFT saves as adapters; `names` has a tensor without values for each."""
    found: set[str] = set()
    by_id = {id(tensor): name for name, tensor in names.items()}
    for adapter in model.peft_config:
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

    for adapter in model.peft_config:
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


def _adapter_state(model: nn.Module, tensors: Mapping[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, dict(tensors), adapter)
    return state
