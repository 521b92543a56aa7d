"""What a finished run writes and shows: a sample, the report, the export, and a figure of its loss and memory."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.engine.engine import Engine
from shardwise.engine.report import Report
from shardwise.errors import ConfigError
from shardwise.plotting import DARK, KIND_COLORS, RED, figure
from shardwise.train.folder import RunFolder, StepMetrics
from shardwise.train.loop import MemoryTrace, TrainLoop
from shardwise.train.screen import Screen, duration

SHOWN_LINES = 16
TEMPERATURE = 0.85
"""With less, a small model repeats itself; with more, it produces noise."""
NARROW = 0.1
"""Phases shorter than this part of the step are not named in the figure."""


def finish(loop: TrainLoop, folder: RunFolder, foreseen_bytes: int | None) -> None:
    """Write sample, report, export and plot of a finished run. All ranks call it, since it gathers weights."""
    screen, job = loop.screen, loop.job
    # Before sampling, whose gathers would count in the report.
    report = (
        f"{_report(loop.trainer.engines[0].report(), loop.trace)}\n{_observed(loop.trace, foreseen_bytes)}".rstrip()
    )
    text = _sample(loop)
    if loop.metrics is not None:
        shutil.rmtree(folder.export, ignore_errors=True)  # the export of an earlier, shorter run
    loop.comm.share_object(None)
    loop.trainer.model.export(folder.export)
    if loop.metrics is None:
        return
    folder.write(folder.report, report + "\n")
    if text:
        folder.write(folder.sample, text + "\n")
        screen.text("sample", "\n".join(text.splitlines()[:SHOWN_LINES]))
    screen.text("report of rank 0", report)
    if rows := loop.metrics.rows:
        _summarise(loop, rows)
        if job.options.outputs.plot:
            plotted = f"{job.shape}; {job.options.placing.config} on {job.ranks}"
            try:
                draw(rows, loop.trace, plotted, folder.plot)
            except ConfigError as error:
                screen.say("plot", f"left out: {error}")
    _list_files(folder, screen)
    folder.write_record(job.identity, job.options.outputs.resume, finished_steps=job.steps)
    screen.say("next", f"--steps {2 * job.steps} continues, --fresh starts over")


def _summarise(loop: TrainLoop, rows: list[StepMetrics]) -> None:
    last = rows[-1]
    tokens = f"{last.tokens / 1e6:.2f} M tokens in {duration(loop.elapsed_s)}"
    loop.screen.say("trained", f"{last.step} steps, {tokens}, {loop.loader.epoch:.2g} epochs")
    if last.val_loss is not None:
        bits = f", {last.val_loss / math.log(2):.2f} bits per byte" if loop.job.corpus.is_text else ""
        loop.screen.say("loss", f"{last.loss:.3f}, validation {last.val_loss:.3f}{bits}")


@torch.no_grad()
def _sample(loop: TrainLoop) -> str:
    """The prompt and what the model makes of it, each token drawn from at most a context of tokens before it."""
    outputs, corpus, engine = loop.job.options.outputs, loop.job.corpus, loop.trainer.model
    if not outputs.sample or not isinstance(engine, Engine):  # a pipeline computes losses alone
        return ""
    tokens = list(outputs.prompt.encode()) if corpus.is_text else corpus.read(0, 1).tolist()
    generator = torch.Generator().manual_seed(loop.job.options.updates.seed)
    engine.eval()
    for _ in range(outputs.sample):
        inputs = torch.tensor([tokens[-loop.job.shape.context :]], device=loop.process.device)
        probabilities = torch.softmax(engine(inputs)[0, -1].double().cpu() / TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    engine.train()
    return as_text(tokens, corpus.is_text)


def _report(found: Report, trace: MemoryTrace | None) -> Report:
    """The engine's report, with the measured peak of one step where it has one: that is what a dry run predicts.

    The allocator's own peak is of the time since it was last reset, and measuring steps resets it.
    """
    if trace is None or found.measured_peak_bytes is None:
        return found
    return dataclasses.replace(found, measured_peak_bytes=trace.peak_bytes)


def _observed(trace: MemoryTrace | None, foreseen_bytes: int | None) -> str:
    """The peak of the last step as an observer of live tensors measured it, independent of the engine's ledger."""
    if trace is None:
        return ""
    parts = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in trace.at_peak.items() if size >= 2**10)
    foreseen = f" ({foreseen_bytes / 2**20:.2f} foreseen)" if foreseen_bytes is not None else ""
    return f"measured from outside: a peak of {trace.peak_bytes / 2**20:.2f} MiB in the last step{foreseen}\n  {parts}"


def _list_files(folder: RunFolder, screen: Screen) -> None:
    names = {
        folder.export: "weights for Hugging Face's Llama",
        folder.checkpoints: "to continue from",
        folder.plot: "loss and memory",
        folder.root / "metrics.csv": "every step (and metrics.jsonl)",
        folder.sample: "the sample",
        folder.report: "the report",
    }
    for path, what in names.items():
        if path.exists():
            screen.say("file", f"{path}{'/' * path.is_dir()}  {what}")


def as_text(tokens: Sequence[int], is_text: bool) -> str:
    """Tokens as text: bytes decoded, with a line end for the zero byte after a file; other tokens as numbers.

    >>> as_text([104, 105, 0, 27, 106], is_text=True)
    'hi\\n�j'
    """
    if not is_text:
        return " ".join(map(str, tokens))
    text = bytes(tokens).replace(b"\0", b"\n").decode(errors="replace")
    # A terminal would execute control codes.
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def draw(rows: Sequence[StepMetrics], trace: MemoryTrace | None, title: str, path: Path) -> None:
    """Write the figure to `path`. Raises a ConfigError if matplotlib is missing."""
    with figure(path, 1, 2, (12, 4.2)) as (made, ((left, right),)):
        _loss(left, rows)
        if trace is not None and len(trace.times_s) > 2:
            _step(right, trace)
        else:
            _memory(right, rows)
        for axis in (left, right):
            axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        made.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)


def _loss(axis: Any, rows: Sequence[StepMetrics]) -> None:
    steps, losses = [row.step for row in rows], [row.loss for row in rows]
    axis.plot(steps, losses, color=DARK, alpha=0.25, linewidth=0.8)
    axis.plot(steps, smoothed(losses), color=DARK, linewidth=1.6, label="training")
    validated = [(row.step, row.val_loss) for row in rows if row.val_loss is not None]
    if validated:
        axis.plot(*zip(*validated, strict=True), color=RED, marker="o", ms=5, label="validation")
        last = validated[-1]
        axis.annotate(f"{last[1]:.2f}", last, (0, -15), textcoords="offset points", color=RED, ha="center")
    axis.set_title("loss (nats per token)", loc="left", fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.legend(fontsize=9, frameon=False)


def smoothed(values: Sequence[float]) -> list[float]:
    """A centred moving average over a fortieth of the values, over fewer of them towards the ends.

    >>> smoothed([4.0, 2.0])
    [4.0, 2.0]
    """
    result = []
    for index in range(len(values)):
        reach = min(len(values) // 80, index, len(values) - 1 - index)
        around = values[index - reach : index + reach + 1]
        result.append(sum(around) / len(around))
    return result


def _step(axis: Any, trace: MemoryTrace) -> None:
    kinds = [kind for kind in KIND_COLORS if any(sizes.get(kind) for sizes in trace.kinds)]
    times_ms = [0.0, *(1e3 * time_s for time_s in trace.times_s)]
    heights = [[sizes.get(kind, 0) / 1e6 for sizes in (trace.kinds[0], *trace.kinds)] for kind in kinds]
    axis.stackplot(
        times_ms, heights, colors=[KIND_COLORS[kind] for kind in kinds], labels=kinds, linewidth=0, step="pre"
    )
    peak_mb = trace.peak_bytes / 1e6
    axis.axhline(peak_mb, color=RED, linewidth=1, linestyle="--")
    axis.text(times_ms[-1], peak_mb, f"peak {peak_mb:.3g}", color=RED, ha="right", va="bottom", fontsize=9)
    for name, start, end in trace.phases if len(trace.phases) <= 3 else ():
        axis.axvline(1e3 * start, color="black", linewidth=0.6, linestyle=":")
        if end - start > NARROW * trace.times_s[-1]:
            axis.text(5e2 * (start + end), 1.12 * peak_mb, name, ha="center", fontsize=9)
    axis.set_ylim(0, 1.2 * peak_mb)
    axis.set_xlim(times_ms[0], times_ms[-1])
    axis.set_title("memory of rank 0 in the last step, MB of tensors", loc="left", fontsize=10)
    axis.set_xlabel("milliseconds (measuring slows the step down)", fontsize=9)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _memory(axis: Any, rows: Sequence[StepMetrics]) -> None:
    steps = [row.step for row in rows]
    axis.plot(steps, [row.peak_bytes / 1e6 for row in rows], color=RED, linestyle="--", label="peak")
    axis.plot(steps, [row.memory_bytes / 1e6 for row in rows], color=DARK, label="now")
    axis.set_ylim(bottom=0)
    axis.set_title("memory of the rank that uses most (MB)", loc="left", fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.legend(fontsize=9, frameon=False, loc="lower right")
