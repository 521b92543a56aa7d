"""`shardwise generate`: continue prompts with a model from a folder, and say what it cost.

Texts become tokens by the tokenizer of the folder, or as bytes for a model that `shardwise train` trained on text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.checks import read_limited
from shardwise.errors import ConfigError
from shardwise.inference.opening import check_folder_files, naming
from shardwise.inference.start import check_arguments, parse_budget, stream
from shardwise.inference.streamed_model import StreamedModel, WeightStream
from shardwise.machine.env import host_device_gbs
from shardwise.sizes import format_bytes

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

        with naming(folder, "read the tokenizer of", "copy the tokenizer's files again, or install what that names"):
            return TokenizerTexts(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
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


def run(
    folder: Path,
    prompts: Sequence[str],
    *,
    weights: str,
    device_memory: str | None,
    host_memory: str | None,
    precision: str | None,
    kv: str,
    max_new_tokens: int,
    batch: int,
    device: str | None,
) -> None:
    """Continue prompts with the model of a folder, and print the texts and the account."""
    check_arguments(weights, precision, kv, batch, max_new_tokens)
    parse_budget("--device-memory", device_memory)
    parse_budget("--host-memory", host_memory)
    texts = texts_for(folder, check_folder_files(folder).get("vocab_size"))
    rows = [texts.encode(prompt) for prompt in prompts]
    batch = min(batch, len(rows))
    model = stream(
        folder,
        weights,  # type: ignore[arg-type]  # checked
        device_memory=device_memory,
        host_memory=host_memory,
        precision=precision,
        kv=kv,  # type: ignore[arg-type]  # checked
        batch=batch,
        context=max(map(len, rows)) + max_new_tokens,
        device=device,
    )
    with model.shardwise_stream as streamed:
        can_generate: Any = getattr(model, "can_generate", bool)
        if not can_generate():
            raise ConfigError(
                f"{folder}: its model, a {type(model).__name__}, does not generate text: name the folder of one "
                "that does, or call the model in Python with shardwise.stream"
            )
        _generate(model, streamed, texts, rows, max_new_tokens, batch)


def _generate(
    model: StreamedModel, weights: WeightStream, texts: Texts, rows: Sequence[list[int]], new_tokens: int, batch: int
) -> None:
    comm = weights.comm
    is_live = len(rows) == 1 and comm.rank == 0 and sys.stdout.isatty()
    made, started = 0, time.perf_counter()
    for part in _batches(len(rows), batch, comm.world_size):
        mine = part[comm.rank]
        ids, mask = padded([rows[number] for number in mine], texts.pad, comm.device)
        show = LiveText(texts) if is_live else None
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=texts.pad,
            streamer=show,
        )
        found = [row[ids.shape[1] :] for row in out.tolist()]
        made += sum(map(len, found))
        shared = comm.share_object(list(zip(mine, found, strict=True)), "the generated tokens")
        if comm.rank == 0 and not is_live:
            _print(texts, rows, dict(pair for each in shared for pair in each))
    seconds = time.perf_counter() - started
    if comm.rank == 0:
        print(account(weights, made * comm.world_size, seconds), file=sys.stderr, flush=True)


def _batches(count: int, batch: int, world_size: int) -> Iterator[list[list[int]]]:
    """The numbers of the prompts of each call, by rank. All ranks call equally often: some repeat the last prompt."""
    for start in range(0, count, batch * world_size):
        numbers = [min(number, count - 1) for number in range(start, start + batch * world_size)]
        yield [list(dict.fromkeys(numbers[rank * batch : (rank + 1) * batch])) for rank in range(world_size)]


def _print(texts: Texts, rows: Sequence[list[int]], found: dict[int, list[int]]) -> None:
    """One prompt as text; of several, each in one line."""
    for number in sorted(found):
        text = texts.decode([*rows[number], *found[number]])
        print(text if len(rows) == 1 else text.replace("\\", "\\\\").replace("\n", "\\n"), flush=True)


class LiveText:
    """Shows a text while it is generated; a streamer of transformers' `generate`."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._tokens: list[int] = []
        self._shown = 0

    def put(self, value: torch.Tensor) -> None:
        self._tokens += value.flatten().tolist()
        text = self._texts.decode(self._tokens)
        whole = text.rstrip("\ufffd")  # the rest of a character is still to come
        print(whole[self._shown :], end="", flush=True)
        self._shown = max(self._shown, len(whole))

    def end(self) -> None:
        print(flush=True)


def account(weights: WeightStream, tokens: int, seconds: float) -> str:
    """One line: tokens/s, seconds a pass, bytes fetched a pass and their rate, device peak foreseen and measured."""
    report = weights.report()
    pass_s = seconds / max(1, report.passes)
    fetched = weights.placement.fetched_bytes
    link = ""
    if weights.comm.device.type == "cuda":
        link = f" of {max(host_device_gbs().values()):.1f}GB/s"
    measured = report.measured_peak_bytes
    peak = format_bytes(measured) if measured is not None else f"{format_bytes(report.weights_peak_bytes)} of weights"
    rate = f"{fetched / pass_s / 1e9:.3g}{link or 'GB/s'}"
    return (
        f"{tokens / seconds:.3g} tokens/s, {pass_s:.3g} s a pass, {format_bytes(fetched)} fetched a pass at {rate}, "
        f"device peak {format_bytes(report.foreseen_peak_bytes)} foreseen and {peak} measured"
    )


def check_folder(model: Path | None, trained: Path) -> Path:
    """The folder of the model; without one, that of the model that `shardwise train` has exported to `trained`."""
    if model is None and not (trained / "config.json").is_file():
        raise ConfigError(
            f"there is no trained model in {trained}: run `shardwise train` first, or name the folder of a model"
        )
    if model is not None and not model.is_dir():
        raise ConfigError(f"{model} is not a folder: name the folder of a Hugging Face model")
    return model if model is not None else trained
