"""Dry runs of a loop of the user's, of what `shardwise compare` would measure, of what a plan is asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compare.job import Settings, config_for
from shardwise.config import Config
from shardwise.models import loading
from shardwise.models.built_in import Batch, MakeBatch
from shardwise.models.decoder import CausalDecoder, adapt
from shardwise.planning.dry_run import Foreseen, Scenario, Untraceable, dry_run
from shardwise.planning.kernels import CPU, cuda
from shardwise.planning.workload import Model, Workload


def foresee(
    build: Callable[[], tuple[nn.Module, MakeBatch]],
    config: Any = "zero3",
    world_size: int | None = None,
    device: str | None = None,
) -> Foreseen:
    """What a rank will hold and send in a step, by a dry run: no memory, no weights, any number of ranks.

    `build` returns the model and `make_batch(rank, step)`, a dictionary of the model's arguments, which gives the loss;
    `config` is what `shardwise.initialize` takes, with the optimizer in it (without one, AdamW is counted). The ranks
    and the device are those of this process unless they are named. A model that needs values to decide what to compute
    raises `shardwise.planning.Untraceable`.

    >>> import torch, shardwise
    >>> class Model(torch.nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x).square().mean()
    >>> def build():
    ...     return Model(64, 64), lambda rank, step: {"x": torch.ones(8, 64)}
    >>> peaks = [shardwise.foresee(build, preset, 4, "cpu").peak_bytes for preset in ("zero1", "zero3")]
    >>> peaks[0] > peaks[1]
    True
    """
    count = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
    is_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    loaded = Config.load(config).for_world_size(count)
    with torch.random.fork_rng(devices=[]):
        return dry_run(Scenario(build, loaded, count, cuda() if is_cuda else CPU))


def foresee_settings(settings: Settings, preset: str) -> Foreseen:
    """One preset of a comparison. Raises `Untraceable`, or a ConfigError as the comparison itself would."""

    def build() -> tuple[nn.Module, MakeBatch]:
        return loading.load(settings.model, "cpu")

    config = Config.load(config_for(settings, preset)).for_world_size(settings.world_size)
    _check_no_disk(config)
    kernels = CPU if settings.device == "cpu" else cuda()
    return dry_run(Scenario(build, config, settings.world_size, kernels))


def foresee_peaks(settings: Settings, presets: Sequence[str]) -> dict[str, int | None]:
    """The peak of a rank under each preset, None where it cannot be foreseen."""
    peaks: dict[str, int | None] = {}
    for preset in presets:
        try:
            peaks[preset] = foresee_settings(settings, preset).peak_bytes
        except (Untraceable, ValueError):
            peaks[preset] = None
    return peaks


def foresee_workload(model: Model, workload: Workload, preset: str, world_size: int) -> Foreseen | str:
    """One preset of a plan on CUDA; a text says why it cannot be foreseen."""
    config = workload.config(preset).for_world_size(world_size)
    build = model.build or partial(described, model, workload)
    try:
        _check_no_disk(config)
        return dry_run(Scenario(build, config, world_size, cuda()))
    except Untraceable as failure:
        return str(failure)


def _check_no_disk(config: Config) -> None:
    """Files have no values to be written without."""
    if "disk" in (config.placement.weights.tier, config.placement.optim.tier):
        raise Untraceable("what rests on the disk is not foreseen by a dry run")


def described(model: Model, workload: Workload) -> tuple[nn.Module, MakeBatch]:
    """The decoder of a model's dimensions, with adapters where the workload has them."""
    assert model.dimensions is not None
    built = CausalDecoder(model.dimensions)
    if workload.lora is not None:
        adapt(built, *workload.lora)

    def make_batch(rank: int, step: int) -> Batch:
        samples = torch.zeros(workload.micro_batch, workload.sequence + 1, dtype=torch.long)
        return {"tokens": samples[:, :-1], "targets": samples[:, 1:]}

    return built, make_batch
