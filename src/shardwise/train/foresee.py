"""Predicts the memory of a training run: a dry run of its own step, on fake tensors."""

from __future__ import annotations

import torch

from shardwise.models.built_in import Batch
from shardwise.planning.dry_run import Scenario, Untraceable, dry_run
from shardwise.planning.kernels import CPU, cuda
from shardwise.train.job import TrainJob
from shardwise.train.model import LanguageModel


def foresee(job: TrainJob, device: torch.device) -> int | None:
    """The peak of a rank's tensors in a step; None if a dry run is not possible (states on the disk).

    It needs no other rank. Its only side effect is on the state of torch's random numbers.
    """
    rows = job.share(0).micro_batch

    def make_batch(rank: int, step: int) -> Batch:
        samples = torch.zeros(rows, job.shape.context + 1, dtype=torch.long)
        return {"tokens": samples[:, :-1], "targets": samples[:, 1:]}

    kernels = CPU if device.type == "cpu" else cuda()
    try:
        scenario = Scenario(lambda: (LanguageModel(job.shape), make_batch), job.config, job.world_size, kernels)
        return dry_run(scenario).peak_bytes
    except (Untraceable, ValueError):
        return None
