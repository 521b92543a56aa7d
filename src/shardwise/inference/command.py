"""`shardwise generate`: continue prompts with a model from a folder, and say what it cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.inference.opening import check_folder_files
from shardwise.inference.start import check_arguments, parse_budget, stream
from shardwise.inference.streamed_model import WeightStream
from shardwise.inference.texts import Texts, padded, read_prompts, texts_for
from shardwise.machine.env import host_device_gbs
from shardwise.sizes import format_bytes


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command."""

    model: Path
    prompt: str | None
    prompts: Path | None
    weights: str
    device_memory: str | None
    host_memory: str | None
    precision: str | None
    kv: str
    max_new_tokens: int
    batch: int
    device: str | None


def run(options: GenerateOptions) -> None:
    """Generate, and print the texts and the account."""
    prompts = read_prompts(options.prompt, options.prompts)
    check_arguments(options.weights, options.precision, options.kv, options.batch, options.max_new_tokens)
    for name in ("device_memory", "host_memory"):
        parse_budget(f"--{name.replace('_', '-')}", getattr(options, name))
    texts = texts_for(options.model, check_folder_files(options.model).get("vocab_size"))
    rows = [texts.encode(prompt) for prompt in prompts]
    batch = min(options.batch, len(rows))
    model: Any = stream(
        options.model,
        options.weights,  # type: ignore[arg-type]  # checked
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        precision=options.precision,
        kv=options.kv,  # type: ignore[arg-type]  # checked
        batch=batch,
        context=max(map(len, rows)) + options.max_new_tokens,
        device=options.device,
    )
    weights: WeightStream = model.shardwise_stream
    with weights:
        _generate(model, weights, texts, rows, options.max_new_tokens, batch)


def _generate(
    model: Any, weights: WeightStream, texts: Texts, rows: Sequence[list[int]], new_tokens: int, batch: int
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
