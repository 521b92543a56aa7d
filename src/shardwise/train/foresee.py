"""The memory of a run before it begins: a dry run of its very step, on fake tensors."""

from __future__ import annotations

import torch

from shardwise.models.built_in import Batch
from shardwise.planning.dry import Scenario, Untraceable, dry_run
from shardwise.planning.kernels import CPU, cuda
from shardwise.train.job import TrainJob
from shardwise.train.model import LanguageModel


def foresee(job: TrainJob, device: torch.device) -> int | None:
    """The most bytes of tensors that a rank holds in a step; None where no dry run can tell (states on the disk).

    Nobody else takes part in it, and it leaves nothing behind but the state of torch's random numbers.
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
