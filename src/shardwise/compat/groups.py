"""`deepspeed.utils.groups`: all ranks are data-parallel, and there is no other kind."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_sequence_parallel_group() -> Any:
    return None


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0
