"""Opening a Hugging Face folder without building its model first: from `config.json`, with values read when needed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.deferred.deferred import deferred_init
from shardwise.deferred.pretrained import PretrainedWeights, close_files
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files import read_json
from shardwise.partition.policy import DTYPES

_INDEX = "model.safetensors.index.json"


def open_folder(folder: Path, device: torch.device, precision: str | None, may_load: bool) -> nn.Module:
    """The model of a folder, on meta; its values are in the files until units are built.

    transformers changes the tensors of some architectures when it loads them. With `may_load`, it loads such a model
    into host memory.
    """
    config = _configuration(folder)
    with deferred_init(folder, device=device):
        model = _build(config, folder, DTYPES.get(precision or "", file_dtype(config)))
    needs_values = precision is not None and precision not in DTYPES  # to be quantized
    if needs_values or (may_load and not PretrainedWeights(folder).has_names_of(model)):
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES.get(precision or "", "auto"))
        model = loaded
    close_files()
    return model.eval()


def file_dtype(config: Any) -> torch.dtype:
    """The dtype that a configuration names."""
    named = getattr(config, "dtype", None)
    if named is None:  # the older name, which warns where the newer one is meant
        named = getattr(config, "torch_dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    return named if isinstance(named, torch.dtype) else torch.float32


def check_folder_files(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. A CheckpointError says what the folder lacks."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json: name the folder of a Hugging Face model, as save_pretrained or `shardwise "
            "export` writes it"
        )
    config = read_json(folder / "config.json", dict[str, Any], CheckpointError, "copy the folder again")
    if not (folder / _INDEX).is_file() and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} has no .safetensors file: load the model with transformers and save it with "
            "model.save_pretrained(folder), which writes them"
        )
    return config


def _configuration(folder: Path) -> Any:
    check_folder_files(folder)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError(
            "opening a Hugging Face folder needs transformers: pip install 'shardwise[hf]', or pass a model"
        ) from None
    return AutoConfig.from_pretrained(folder)


def _build(config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    names = getattr(config, "architectures", None) or []
    kind = next((found for name in names if (found := getattr(transformers, name, None))), None)
    maker = kind._from_config if kind is not None else transformers.AutoModelForCausalLM.from_config
    model: Any = maker(config, dtype=dtype)
    if hasattr(model, "generation_config"):
        with contextlib.suppress(OSError):  # the folder has none
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    made: nn.Module = model
    return made
