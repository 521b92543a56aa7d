"""What a finished run writes and shows: a sample, the report, the export and the plot."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence

import torch

from shardwise.engine.engine import Engine
from shardwise.engine.report import Report
from shardwise.errors import ConfigError
from shardwise.train.folder import RunFolder, StepMetrics
from shardwise.train.loop import TrainLoop
from shardwise.train.plot import draw
from shardwise.train.screen import Screen, duration
from shardwise.train.step_watch import MemoryTrace

SHOWN_LINES = 16
TEMPERATURE = 0.85
"""With less, a small model repeats itself; with more, it produces noise."""


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
