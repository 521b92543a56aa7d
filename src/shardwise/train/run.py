"""A run from beginning to end on one rank: what it is made of, where it goes on, what it leaves."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import shardwise
from shardwise.comm.comm import Comm
from shardwise.engine.engine import Engine
from shardwise.errors import ConfigError
from shardwise.train import finish
from shardwise.train.data import Loader
from shardwise.train.folder import Folder, check_identity
from shardwise.train.job import Job
from shardwise.train.loop import Here, Loop
from shardwise.train.metrics import Metrics
from shardwise.train.model import LanguageModel
from shardwise.train.rate import factor
from shardwise.train.screen import Screen, make_screen

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


def run(job: Job, here: Here, comm: Comm) -> None:
    """Train, or go on with what is there; then finish, unless a signal came."""
    folder = Folder(job.options.outputs.out)
    _open(folder, job, comm)
    screen = make_screen(comm.rank)
    _introduce(job, here, screen)
    foreseen_bytes = _foresee(job, here, screen) if comm.rank == 0 else None
    engine = build_engine(job, here)
    if foreseen_bytes is not None:
        engine.expect(foreseen_bytes)
    with _warnings_on(screen):
        state = _load(folder, job, engine)
    loop = Loop(
        job=job,
        here=here,
        comm=comm,
        engine=engine,
        loader=Loader(job.windows[0], job.share(comm.rank), job.options.updates.seed),
        screen=screen,
        metrics=_metrics(folder, job, state) if comm.rank == 0 else None,
    )
    loop.foreseen_bytes = foreseen_bytes
    if state is not None:
        loop.resume(state)
        screen.say("resume", f"at step {loop.step} of {job.steps}, sample {loop.loader.taken}")
    if loop.train():
        finish.finish(loop, folder)
    else:
        screen.say("stopped", f"saved step {loop.step} of {job.steps} in {folder.root}; the same command goes on")
    comm.share_object(None)  # leave together: rank 0 may still be writing


def build_engine(job: Job, here: Here) -> Engine:
    """Model, optimizer and schedule under the configuration."""
    torch.manual_seed(job.options.updates.seed)
    with shardwise.deferred_init(device=here.device):
        model = LanguageModel(job.shape)
    optimizer = None if job.config.optimizer is not None else functools.partial(_optimizer, rate=job.rate)
    return shardwise.initialize(model, optimizer, job.config, functools.partial(_scheduler, job))


def _optimizer(params: Iterable[Any], rate: float) -> torch.optim.Optimizer:
    """AdamW; vectors (norms) are not pulled to zero."""
    given = list(params)
    groups = [
        {"params": [param for param in given if param.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [param for param in given if param.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def _scheduler(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    asked = job.options.updates.schedule
    if job.config.scheduler is not None and asked is None:
        return job.config.scheduler.build(optimizer, total_steps=job.steps)
    shape = {"steps": job.steps, "warmup": job.warmup, "schedule": asked or "cosine"}
    return LambdaLR(optimizer, lambda step: factor(step, **shape))  # type: ignore[arg-type]  # by name


def _open(folder: Folder, job: Job, comm: Comm) -> None:
    """Rank 0 makes the folder ready, and all learn whether it could."""
    error = None
    if comm.rank == 0:
        try:
            folder.open()
            if job.options.outputs.fresh and not _is_restart():
                folder.clear()
            folder.check(job.identity, job.options.outputs.resume)
            folder.write_record(job.identity, job.options.outputs.resume)
        except ConfigError as found:
            error = str(found)
    if (error := comm.share_object(error)[0]) is not None:
        raise ConfigError(error)


def _is_restart() -> bool:
    """Whether torchrun has started this process in the place of one that failed: --fresh was obeyed then."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextlib.contextmanager
def _warnings_on(screen: Screen) -> Iterator[None]:
    """What is logged meanwhile, such as a damaged checkpoint that is passed over, is shown: stderr is a file here."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: screen.say("warning", record.getMessage())  # type: ignore[method-assign]  # one use
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _load(folder: Folder, job: Job, engine: Engine) -> dict[str, Any] | None:
    """The state of the newest checkpoint, which the engine now has; None where there is none."""
    source = folder.checkpoints if folder.has_checkpoint else job.options.outputs.resume
    if source is None:
        return None
    bases = list(engine.lr_scheduler.base_lrs)
    state = engine.load(source, fallback=folder.has_checkpoint)
    _keep_rate(engine, bases)
    if not isinstance(state, dict) or "identity" not in state:
        raise ConfigError(f"{source} was not made by `shardwise train`: it does not say where in the data it was")
    check_identity(state["identity"], job.identity, str(source))
    return state


def _keep_rate(engine: Engine, bases: list[Any]) -> None:
    """The rate and its schedule are those that are asked for now, not those of the checkpoint."""
    scheduler = engine.lr_scheduler
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = bases
        for group, base, shape in zip(scheduler.optimizer.param_groups, bases, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * shape(scheduler.last_epoch)


def _metrics(folder: Folder, job: Job, state: dict[str, Any] | None) -> Metrics:
    return Metrics(folder.root, int(state["step"]) if state else 0, job.options.outputs.tensorboard)


def _foresee(job: Job, here: Here, screen: Screen) -> int | None:
    if not job.options.placing.foresee:
        return None
    from shardwise.train.foresee import foresee

    peak_bytes = foresee(job, here.device)
    if peak_bytes is not None:
        screen.say("memory", f"{peak_bytes / 2**20:.2f} MiB of tensors a rank at the peak of a step, by a dry run")
    return peak_bytes


def _introduce(job: Job, here: Here, screen: Screen) -> None:
    config, (train, validation) = job.config, job.windows
    held_out = f"{validation.count} of {train.count + validation.count} samples held out"
    kind = "GPU" if here.device.type == "cuda" else "CPU"
    accumulation = f" in {config.batch.accumulation} micro-batches" if config.batch.accumulation > 1 else ""
    ranks = f"{job.world_size} rank{'s' * (job.world_size > 1)}"
    screen.say("model", str(job.shape))
    screen.say("data", f"{job.corpus}; {held_out}")
    screen.say(
        "run",
        f"{job.options.placing.config} on {ranks} ({kind}), {config.precision.compute}, "
        f"{job.batch} x {job.shape.context} tokens a step{accumulation}",
    )
