"""Dry runs of what a comparison measures, so that predicted peaks stand beside measured ones."""

from __future__ import annotations

from functools import partial

from shardwise.compare.job import Settings, config_for
from shardwise.config import Config
from shardwise.models import loading
from shardwise.planning.dry_run import Foreseen, Scenario, Untraceable, dry_run
from shardwise.planning.kernels import CPU, cuda


def foresee_settings(settings: Settings, preset: str) -> Foreseen:
    """One preset of a comparison. Raises `Untraceable`, or a ConfigError as the comparison itself would."""
    config = Config.load(config_for(settings, preset)).for_world_size(settings.world_size)
    kernels = CPU if settings.device == "cpu" else cuda()
    return dry_run(Scenario(partial(loading.load, settings.model, "cpu"), config, settings.world_size, kernels))


def foresee_peak(settings: Settings, preset: str) -> int | None:
    """The peak of a rank under a preset, or None if a dry run is not possible."""
    try:
        return foresee_settings(settings, preset).peak_bytes
    except (Untraceable, ValueError):
        return None
