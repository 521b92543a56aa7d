"""The small files beside the weights of an export: configuration, generation settings, tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpoint.adapters import base_of
from shardwise.checkpoint.names import underlying
from shardwise.errors import CheckpointError

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.json"),
    *("chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
)


def companions(model: nn.Module, given: Path | None) -> dict[str, bytes]:
    """The files that belong beside a model's weights, by name.

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
