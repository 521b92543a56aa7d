"""Prompts and tokens: a folder's own tokenizer, or bytes for a model that `shardwise train` trained on text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.checks import read_limited
from shardwise.errors import ConfigError

_MOST_PROMPT_BYTES = 1 << 28
_BYTES = 256


class Texts(Protocol):
    """From texts to tokens and back."""

    pad: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTexts:
    """A token is a byte of the text in UTF-8."""

    pad = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class TokenizerTexts:
    """The tokenizer of a folder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ends = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self.pad = next((token for token in ends if token is not None), 0)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def texts_for(folder: Path, vocabulary: int | None) -> Texts:
    """How the texts of a model's folder become tokens."""
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if any((folder / name).is_file() for name in files):
        from transformers import AutoTokenizer

        return TokenizerTexts(AutoTokenizer.from_pretrained(folder))
    if vocabulary == _BYTES:
        return ByteTexts()
    raise ConfigError(
        f"{folder} has no tokenizer, and its vocabulary of {vocabulary} is not that of bytes: copy the tokenizer's "
        "files into the folder"
    )


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompt, or the lines of a file that are not empty."""
    if (prompt is None) == (file is None):
        raise ConfigError("give the text to begin with, one of the two: --prompt TEXT, or --prompts FILE")
    if prompt is not None:
        if not prompt:
            raise ConfigError("--prompt is empty: give some text to begin with")
        return [prompt]
    assert file is not None
    lines = [line for line in read_limited(file, _MOST_PROMPT_BYTES).decode(errors="replace").splitlines() if line]
    if not lines:
        raise ConfigError(f"--prompts {file}: has no line with text: write one prompt in each line")
    return lines


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows of one length, filled up on the left, and the mask of what is text."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
