"""A run on one rank: open the folder, build the model and the engine, resume, train and finish.

The model is the decoder of `shardwise.models`, with the names and the configuration with which Hugging Face's Llama
reads its export.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import shardwise
from shardwise.comm import Comm
from shardwise.config.auto import UserObjects
from shardwise.config.sections import Batch
from shardwise.config.shape import shape_on_nodes
from shardwise.errors import ConfigError, ShardwiseWarning
from shardwise.files import validated
from shardwise.models.decoder import NORM_EPSILON, ROTARY_BASE, CausalDecoder
from shardwise.models.tensor_parallel import tensor_parallel
from shardwise.train.data import SampleLoader
from shardwise.train.finish import finish
from shardwise.train.folder import REMEDY, MetricsFiles, RunFolder, TrainPosition, check_identity
from shardwise.train.job import Shape, TrainJob, rate_factor
from shardwise.train.loop import EngineTrainer, PipelineTrainer, RankProcess, Trainer, TrainLoop
from shardwise.train.screen import Screen, make_screen

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


class HubConfig(dict[str, Any]):
    """The config.json with which Hugging Face's Llama reads the exported weights."""

    def to_json_string(self) -> str:
        return json.dumps(self, indent=1) + "\n"


class LanguageModel(CausalDecoder):
    """A Llama of a given shape with fresh weights; an export of it loads wherever Llama checkpoints load."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.dimensions, fused=False)
        self.config = hub_config(shape)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)  # small: the first loss is that of a uniform guess


def hub_config(shape: Shape) -> HubConfig:
    """The configuration of a model of this shape."""
    return HubConfig(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.dimensions.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=NORM_EPSILON,
        rope_theta=ROTARY_BASE,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def run(job: TrainJob, process: RankProcess, comm: Comm) -> None:
    """Train from the start or from the newest checkpoint; finish unless a signal stopped the run."""
    folder = RunFolder(job.options.outputs.out)
    _open(folder, job, comm)
    screen = make_screen(comm.rank)
    _introduce(job, process, screen)
    foresees = job.options.placing.foresee and comm.rank == 0 and job.tp == job.pp == 1
    foreseen_bytes = _foresee(job, process, screen) if foresees else None
    with _warnings_on(screen):
        trainer = build_trainer(job, process)
        if foreseen_bytes is not None:
            trainer.engines[0].expect(foreseen_bytes)
        state = _load(folder, job, trainer)
    metrics = None
    if comm.rank == 0:
        metrics = MetricsFiles(folder.root, state.step if state is not None else 0, job.options.outputs.tensorboard)
    loader = SampleLoader(job.windows[0], job.share(comm.rank // job.tp % job.world_size), job.options.updates.seed)
    loop = TrainLoop(job, process, comm, trainer, loader, screen, metrics)
    if state is not None:
        loop.resume(state)
        screen.say("resume", f"at step {loop.step} of {job.steps}, sample {loop.loader.taken}")
    if loop.train():
        finish(loop, folder, foreseen_bytes)
    else:
        screen.say("stopped", f"saved step {loop.step} of {job.steps} in {folder.root}; the same command continues")
    comm.share_object(None)  # exit together: rank 0 may still be writing


def build_trainer(job: TrainJob, process: RankProcess) -> Trainer:
    """An engine, or a pipeline, with the model, optimizer and schedule of the job."""
    torch.manual_seed(job.options.updates.seed)
    sizes = {"pp": job.pp, "dp": job.world_size, "tp": job.tp}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    mesh = None
    if len(axes) > 1:
        mesh = init_device_mesh(process.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    with shardwise.deferred_init(device=process.device):
        model = LanguageModel(job.shape)
        if job.tp > 1:
            assert mesh is not None
            tensor_parallel(model, mesh["tp"])
    optimizer = None if job.config.optimizer is not None else functools.partial(_optimizer, rate=job.rate)
    scheduler = functools.partial(_scheduler, job)
    if job.pp == 1:
        return EngineTrainer(shardwise.initialize(model, optimizer, job.config, scheduler, mesh))
    # A step of the pipeline is all micro-batches of a step.
    config = job.config.with_sections(batch=Batch())
    micro_batches = job.config.batch.accumulation
    return PipelineTrainer(
        shardwise.pipeline(model, mesh, optimizer, config, micro_batches=micro_batches, lr_scheduler=scheduler)
    )


def _optimizer(params: Iterable[Any], rate: float) -> torch.optim.Optimizer:
    """AdamW, without weight decay on vectors (norms)."""
    given = list(params)
    matrices, vectors = [p for p in given if p.ndim > 1], [p for p in given if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def _scheduler(job: TrainJob, optimizer: torch.optim.Optimizer) -> Any:
    asked = job.options.updates.schedule
    if job.config.scheduler is not None and asked is None:
        resolved = job.config.for_objects(UserObjects(optimizer=optimizer), warns=False)
        assert resolved.scheduler is not None
        return resolved.scheduler.build(optimizer, total_steps=job.steps)
    shape = {"steps": job.steps, "warmup": job.warmup, "schedule": asked or "cosine"}
    return LambdaLR(optimizer, lambda step: rate_factor(step, **shape))  # type: ignore[arg-type]  # by name


def _open(folder: RunFolder, job: TrainJob, comm: Comm) -> None:
    """Rank 0 prepares the folder; if it cannot, all ranks raise the same ConfigError."""
    error = None
    if comm.rank == 0:
        try:
            folder.open()
            # When torchrun restarts this process after a failure, --fresh has already cleared the folder.
            is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            if job.options.outputs.fresh and not is_restart:
                folder.clear()
            folder.check(job.identity, job.options.outputs.resume)
            folder.write_record(job.identity, job.options.outputs.resume)
        except ConfigError as found:
            error = str(found)
    if (error := comm.share_object(error)[0]) is not None:
        raise ConfigError(error)


@contextlib.contextmanager
def _warnings_on(screen: Screen) -> Iterator[None]:
    """Show warnings, such as one about a damaged checkpoint, on the screen: stderr goes to a file."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: screen.say("warning", record.getMessage())  # type: ignore[method-assign]  # one use
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always", ShardwiseWarning)
            yield
    finally:
        logger.removeHandler(handler)
        for each in raised:
            if issubclass(each.category, ShardwiseWarning):
                screen.say("warning", str(each.message))
            else:
                warnings.showwarning(each.message, each.category, each.filename, each.lineno)


def _load(folder: RunFolder, job: TrainJob, trainer: Trainer) -> TrainPosition | None:
    """Load the newest checkpoint and return its position; None if there is none."""
    source = folder.checkpoints if folder.has_checkpoint else job.options.outputs.resume
    if source is None:
        return None
    bases = list(trainer.engines[0].lr_scheduler.base_lrs)
    state = trainer.model.load(source, fallback=folder.has_checkpoint)
    for scheduler in [engine.lr_scheduler for engine in trainer.engines]:
        if isinstance(scheduler, LambdaLR):  # the rate and schedule of this command, not those of the checkpoint
            scheduler.base_lrs = bases
            for group, base, shape in zip(scheduler.optimizer.param_groups, bases, scheduler.lr_lambdas, strict=True):
                group["lr"] = base * shape(scheduler.last_epoch)
    if not isinstance(state, dict) or "identity" not in state:
        raise ConfigError(f"{source} was not made by `shardwise train`: it has no position in the data")
    position = validated(TrainPosition, state, f"the state in {source}", ConfigError, REMEDY)
    check_identity(position.identity, job.identity, str(source))
    return position


def _foresee(job: TrainJob, process: RankProcess, screen: Screen) -> int | None:
    """The peak of a rank's tensors in a step; None if a dry run is not possible (states on the disk)."""
    from shardwise.dry_run.dry_run import Scenario, Untraceable, blank_text, dry_run
    from shardwise.dry_run.kernels import kernels_for

    make_batch = blank_text(job.share(0).micro_batch, job.shape.context)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
    ranks, kernels = shape_on_nodes(range(job.world_size), local), kernels_for(process.device.type)
    scenario = Scenario(lambda: (LanguageModel(job.shape), make_batch), job.config, ranks, kernels)
    try:
        peak_bytes = dry_run(scenario).peak_bytes
    except (Untraceable, ValueError):
        return None
    screen.say("memory", f"{peak_bytes / 2**20:.2f} MiB of tensors a rank at the peak of a step, by a dry run")
    return peak_bytes


def _introduce(job: TrainJob, process: RankProcess, screen: Screen) -> None:
    config, (train, validation) = job.config, job.windows
    held_out = f"{validation.count} of {train.count + validation.count} samples held out"
    kind = "GPU" if process.device.type == "cuda" else "CPU"
    accumulation = f" in {config.batch.accumulation} micro-batches" if config.batch.accumulation > 1 else ""
    screen.say("model", str(job.shape))
    screen.say("data", f"{job.corpus}; {held_out}")
    batch = f"{job.batch} x {job.shape.context} tokens a step{accumulation}"
    screen.say("run", f"{job.options.placing.config} on {job.ranks} ({kind}), {config.precision.compute}, {batch}")
