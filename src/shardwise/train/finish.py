"""The end of a run: sample, report, exported weights, plot."""

from __future__ import annotations

import math
import shutil

from shardwise.errors import ConfigError
from shardwise.train.folder import Folder
from shardwise.train.loop import Loop
from shardwise.train.memory import Trace
from shardwise.train.metrics import Row
from shardwise.train.sample import as_text, sample
from shardwise.train.screen import Screen, duration

SHOWN_LINES = 16


def finish(loop: Loop, folder: Folder) -> None:
    """Everything a finished run leaves beside its checkpoint. All ranks call it: weights are gathered for it."""
    screen, job = loop.screen, loop.job
    report = (
        f"{loop.engine.report()}\n{_observed(loop.trace, loop.foreseen_bytes)}".rstrip()
    )  # before a sample adds its gathers
    text = _sample(loop)
    _export(loop, folder)
    if loop.metrics is None:
        return
    folder.report.write_text(report + "\n")
    if text:
        folder.sample.write_text(text + "\n")
        screen.text("sample", "\n".join(text.splitlines()[:SHOWN_LINES]))
    screen.text("report of rank 0", report)
    if loop.metrics.rows:
        _summarise(loop, loop.metrics.rows)
        if job.options.outputs.plot:
            _plot(loop, loop.metrics.rows, folder)
    _list_files(folder, screen)
    folder.write_record(job.identity, job.options.outputs.resume, finished_steps=job.steps)
    screen.say("next", f"--steps {2 * job.steps} trains on, --fresh starts over")


def _summarise(loop: Loop, rows: list[Row]) -> None:
    last = rows[-1]
    tokens = f"{last.tokens / 1e6:.2f} M tokens in {duration(loop.elapsed_s)}"
    loop.screen.say("trained", f"{last.step} steps, {tokens}, {loop.loader.epoch:.2g} epochs")
    if last.val_loss is not None:
        bits = f", {last.val_loss / math.log(2):.2f} bits per byte" if loop.job.corpus.is_text else ""
        loop.screen.say("loss", f"{last.loss:.3f}, validation {last.val_loss:.3f}{bits}")


def _sample(loop: Loop) -> str:
    outputs, corpus = loop.job.options.outputs, loop.job.corpus
    if not outputs.sample:
        return ""
    prompt = list(outputs.prompt.encode()) if corpus.is_text else loop.job.windows[1].corpus.read(0, 1).tolist()
    tokens = sample(loop.engine, prompt, outputs.sample, loop.job.shape.context, loop.job.options.updates.seed)
    return as_text(tokens, corpus.is_text)


def _export(loop: Loop, folder: Folder) -> None:
    if loop.metrics is not None:
        shutil.rmtree(folder.export, ignore_errors=True)  # of fewer steps
    loop.comm.share_object(None)
    loop.engine.export(folder.export)


def _observed(trace: Trace | None, foreseen_bytes: int | None) -> str:
    """The peak of the last step as an observer of live tensors saw it, apart from the engine's own account."""
    if trace is None:
        return ""
    parts = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in trace.at_peak.items() if size >= 2**10)
    foreseen = f" ({foreseen_bytes / 2**20:.2f} foreseen)" if foreseen_bytes is not None else ""
    return f"seen from outside: a peak of {trace.peak_bytes / 2**20:.2f} MiB in the last step{foreseen}\n  {parts}"


def _plot(loop: Loop, rows: list[Row], folder: Folder) -> None:
    from shardwise.train.plot import draw

    job = loop.job
    try:
        draw(rows, loop.trace, f"{job.shape}; {job.options.placing.config} on {job.world_size} rank(s)", folder.plot)
    except ConfigError as error:
        loop.screen.say("plot", f"left out: {error}")


def _list_files(folder: Folder, screen: Screen) -> None:
    names = {
        folder.export: "weights for Hugging Face's Llama",
        folder.checkpoints: "to go on from",
        folder.plot: "loss and memory",
        folder.root / "metrics.csv": "every step (and metrics.jsonl)",
        folder.sample: "the sample",
        folder.report: "the report",
    }
    for path, what in names.items():
        if path.exists():
            screen.say("file", f"{path}{'/' * path.is_dir()}  {what}")
