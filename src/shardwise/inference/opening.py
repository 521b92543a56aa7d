"""Opening a Hugging Face folder without building its model first: from `config.json`, with values read when needed."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.deferred.deferred import deferred_init
from shardwise.deferred.pretrained import PretrainedWeights, close_files, listing
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.files import read_json
from shardwise.partition.policy import DTYPES

_INDEX = "model.safetensors.index.json"
_MOST_SAID = 300
_LOG = logging.getLogger("shardwise")


def open_folder(folder: Path, device: torch.device, precision: str | None, may_load: bool) -> nn.Module:
    """The model of a folder, on meta; its values are in the files until units are built.

    transformers changes the tensors of some architectures, and all that are quantized, when it loads them. With
    `may_load`, it loads such a model into host memory.
    """
    config = _configuration(folder)
    stored = PretrainedWeights(folder, strict=False)
    dtype = DTYPES.get(precision or "") or named_dtype(config) or stored.dtype or torch.float32
    quantized_by = _quantized_by(config)
    if quantized_by is not None and not may_load:
        raise ConfigError(
            f"{folder} holds weights that {quantized_by} has quantized, and transformers prepares these when it loads "
            "them: take weights='host', with which it does"
        )
    needs_values = precision is not None and precision not in DTYPES  # to be quantized
    if needs_values or quantized_by is not None:
        return _loaded(config, folder, dtype)
    with deferred_init(folder, device=device, strict=False), _naming(folder, "build"):
        model = _build(config, folder, dtype)
    if may_load and not stored.has_names_of(model):
        return _loaded(config, folder, dtype)
    if unexpected := stored.unexpected(model):
        _LOG.warning("%s has %s, which %s ignores", folder, listing(unexpected), type(model).__name__)
    close_files()
    return model.eval()


def named_dtype(config: Any) -> torch.dtype | None:
    """The dtype that a configuration names, if any."""
    named = getattr(config, "dtype", None)
    if named is None:  # the older name, which warns where the newer one is meant
        named = getattr(config, "torch_dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    return named if isinstance(named, torch.dtype) else None


def check_folder_files(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. A CheckpointError says what the folder lacks."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder} holds a PEFT adapter, and not the model that it changes: load both with PEFT and pass the "
                "model, or the folder to which you save what its merge_and_unload() returns"
            )
        if (folder / "model_index.json").is_file():
            raise CheckpointError(
                f"{folder} holds a pipeline of diffusers, which is several models: load it with diffusers and pass one "
                "of them, as pipeline.transformer or pipeline.unet"
            )
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
    with _naming(folder, "read the configuration of"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@contextlib.contextmanager
def naming(folder: Path, doing: str, remedy: str) -> Iterator[None]:
    """Have errors of transformers name the folder, and what to do."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:  # whatever its many classes raise
        said = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {said[:_MOST_SAID]}{'...' * (len(said) > _MOST_SAID)}"
        raise ConfigError(f"transformers cannot {doing} {folder} ({reason}): {remedy}") from error


def _naming(folder: Path, doing: str) -> contextlib.AbstractContextManager[None]:
    remedy = (
        "install what that names or correct config.json, or build the model in Python and pass it to shardwise.stream"
    )
    return naming(folder, doing, remedy)


def _quantized_by(config: Any) -> str | None:
    """The method with which the weights of a folder are quantized."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return str(method or "an unnamed method")


def _class(config: Any) -> Any:
    """The class of transformers that a configuration names; one for causal models, if it names none."""
    import transformers

    names = getattr(config, "architectures", None) or []
    found = (getattr(transformers, name, None) for name in names)
    return next((kind for kind in found if hasattr(kind, "from_pretrained") and hasattr(kind, "forward")), None)


def _build(config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    kind = _class(config)
    if kind is not None:
        model: Any = kind._from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    _keep_in_fp32(model, dtype)
    if hasattr(model, "generation_config"):
        with contextlib.suppress(OSError):  # the folder has none
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    made: nn.Module = model
    return made


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters fp32 that transformers loads in fp32, whatever the model's dtype is."""
    lists = {"_keep_in_fp32_modules": (torch.float16,), "_keep_in_fp32_modules_strict": (torch.float16, torch.bfloat16)}
    kept = [name for each, dtypes in lists.items() if dtype in dtypes for name in getattr(model, each, None) or ()]
    patterns = [re.compile(name.replace("*", ".*")) for name in kept]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def _loaded(config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model as transformers loads it. It gives random values to what the files lack, which is refused."""
    import transformers

    kind = _class(config) or transformers.AutoModelForCausalLM
    with _naming(folder, "load"):
        model, info = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, trust_remote_code=False)
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{folder} lacks {listing(missing)}, which {type(model).__name__} needs: give a checkpoint of this model, "
            "or name another class under architectures in config.json"
        )
    made: nn.Module = model
    return made.eval()
